"""Sessions: conversations that keep their KV between turns."""

from tandem.engine_core.errors import RequestError
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.protocol.errors import ErrorCode


def scoped(key: str, name: str) -> str:
    """Return the name that a session or a cache salt of an API key has in the engine.

    No two pairs give the same one; without a key it is the name itself.
    """
    return f"\0{key}\0{name}" if key or name.startswith("\0") else name


def split_scoped(name: str) -> tuple[str, str]:
    """Return the key and the name that `scoped` has joined."""
    if not name.startswith("\0"):
        return "", name
    key, _, own = name[1:].partition("\0")
    return key, own


class Session:
    """One conversation.

    Its nodes are pinned in the tree; a turn in progress locks them as any sequence does.
    """

    __slots__ = ("ending", "firsts", "idle_since", "name", "nodes", "turn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[int] = []
        """Nodes of the prefix cache that the session keeps, from the root on."""
        self.firsts: list[int] = []
        """Index of the first node whose pages the session keeps, by class."""
        self.turn: int | None = None
        """Id of the sequence that is the turn in progress; None: the session is idle."""
        self.idle_since = 0.0
        """Time, in seconds, of the end of the last turn."""
        self.ending = False
        """True if the session ends with its turn."""


class Sessions:
    """The sessions of an engine, by name, so that any frontend can continue one.

    There are at most `max_sessions` at a time. Idle sessions end after `ttl` seconds, or, the longest idle first, when
    memory is short: the next turn of such a session computes its prompt again.
    """

    def __init__(self, tree: RadixTree | None, max_sessions: int, ttl: float) -> None:
        """Start without sessions.

        tree: the prefix cache; None if it is off, and then no session can begin. max_sessions: largest number at a
        time; ttl: seconds that a session may be idle.
        """
        self.tree = tree
        self.max_sessions = max_sessions
        self.ttl = ttl
        self.num_evicted = 0
        """Number of idle sessions that ended early, for their memory or to make room for another."""
        self._known: dict[str, Session] = {}
        self._idle: dict[str, Session] = {}
        """Sessions without a turn in progress, the longest idle first."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def known(self) -> list[Session]:
        """Every session, the oldest first."""
        return list(self._known.values())

    def check(self, name: str) -> None:
        """Raise RequestError if a turn of the session cannot begin now."""
        if self.tree is None or not self.max_sessions:
            raise RequestError(
                ErrorCode.SESSIONS_OFF,
                "session_id needs the prefix cache and room for sessions: start the engine with --prefix-cache on and "
                "--max-sessions above 0, or leave session_id out",
            )
        session = self._known.get(name)
        if session is not None and session.turn is not None:
            raise RequestError(
                ErrorCode.SESSION_BUSY,
                f"session {split_scoped(name)[1]!r} has a turn in progress; wait for its end, or abort it",
            )
        if session is None and len(self._known) >= self.max_sessions and not self._idle:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"all {self.max_sessions} sessions have a turn in progress; retry later or raise --max-sessions",
            )

    def begin_turn(self, name: str, seq_id: int) -> None:
        """Begin a turn that `check` has accepted."""
        session = self._known.get(name)
        if session is None:
            if len(self._known) >= self.max_sessions:
                self._evict(next(iter(self._idle.values())))
            session = self._known[name] = Session(name)
        self._idle.pop(name, None)
        session.turn = seq_id

    def resume(self, name: str, seq_id: int, path: list[int]) -> None:
        """Unpin the nodes of a session that its new turn does not continue from.

        They are not on the path from which the turn starts: they hold tokens that the conversation no longer has. Does
        nothing if the session has ended meanwhile.
        """
        session = self._known.get(name)
        if session is None or session.turn != seq_id:
            return
        common = 0
        for mine, matched in zip(session.nodes, path, strict=False):
            if mine != matched:
                break
            common += 1
        self._keep(session, session.nodes[:common])

    def end_turn(self, name: str, seq_id: int, now: float, path: list[int] | None) -> None:
        """End a turn; the session keeps the nodes of this path.

        path None: the turn did not run, so the session keeps the nodes that it had, and ends if it had none. Does
        nothing if the session has ended meanwhile.
        """
        session = self._known.get(name)
        if session is None or session.turn != seq_id:
            return
        if path is not None:
            self._keep(session, path)
        session.turn = None
        session.idle_since = now
        self._idle[name] = session
        if session.ending or (path is None and not session.nodes):
            self._drop(session)

    def end(self, name: str) -> bool:
        """End a session, now or with its turn; return whether there was one."""
        session = self._known.get(name)
        if session is None:
            return False
        session.ending = True
        if session.turn is None:
            self._drop(session)
        return True

    def expire(self, now: float) -> None:
        """End the sessions that have been idle for `ttl` seconds."""
        while self._idle:
            session = next(iter(self._idle.values()))
            if now - session.idle_since < self.ttl:
                return
            self._drop(session)

    def release_one(self) -> bool:
        """Unpin the nodes of one session; return False if no session has nodes.

        Idle sessions come first: the longest idle one with nodes ends. After them, a session with a turn in progress
        loses its nodes and goes on.
        """
        for session in self._idle.values():
            if session.nodes:
                self._evict(session)
                return True
        for session in self._known.values():
            if session.nodes:
                self._keep(session, [])
                return True
        return False

    def release_all(self) -> None:
        """Unpin the nodes of all sessions, which go on without them."""
        for session in self._known.values():
            if session.nodes:
                self._keep(session, [])

    def _evict(self, session: Session) -> None:
        self._drop(session)
        self.num_evicted += 1

    def _drop(self, session: Session) -> None:
        if self.tree is not None and session.nodes:
            self.tree.mark(session.nodes[-1])
        self._keep(session, [])
        del self._known[session.name]
        self._idle.pop(session.name, None)

    def _keep(self, session: Session, nodes: list[int]) -> None:
        """Replace the nodes that a session pins."""
        tree = self.tree
        assert tree is not None, f"session {session.name!r} without a prefix cache"
        firsts = tree.pin(nodes)
        if session.nodes:
            tree.unpin(session.nodes, session.firsts)
        session.nodes, session.firsts = list(nodes), firsts
