"""Conversations whose KV stays between turns."""

from tandem.engine_core.errors import RequestError
from tandem.engine_core.kv_cache.radix import RadixTree
from tandem.protocol.errors import ErrorCode


class Session:
    """One conversation. Its pages are pinned in the tree; a turn in progress reads them like any sequence."""

    __slots__ = ("ending", "idle_since", "name", "pages", "turn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages: list[int] = []
        self.turn: int | None = None
        """Id of the sequence that is its turn in progress."""
        self.idle_since = 0.0
        self.ending = False
        """Whether it ends with its turn."""


class Sessions:
    """Known by name alone, so any frontend can go on with one. At most `most` at a time; idle ones go after `ttl`
    seconds, or when memory is short, oldest first: the next turn of such a one computes its prompt again."""

    def __init__(self, tree: RadixTree | None, most: int, ttl: float) -> None:
        """tree: None where there is no prefix cache, hence no sessions."""
        self.tree = tree
        self.most = most
        self.ttl = ttl
        self.evicted = 0
        """Idle sessions that ended because memory or numbers were short."""
        self._known: dict[str, Session] = {}
        self._idle: dict[str, Session] = {}
        """Of the known ones, those without a turn in progress, longest idle first."""

    def __len__(self) -> int:
        return len(self._known)

    @property
    def known(self) -> list[Session]:
        return list(self._known.values())

    def check(self, name: str) -> None:
        """Raises RequestError if no turn of that session can be taken now."""
        if self.tree is None or not self.most:
            raise RequestError(
                ErrorCode.SESSIONS_OFF,
                "session_id needs the prefix cache, and room for sessions: start the engine with --prefix-cache on and "
                "--max-sessions above 0, or leave session_id out",
            )
        session = self._known.get(name)
        if session is not None and session.turn is not None:
            raise RequestError(
                ErrorCode.SESSION_BUSY, f"session {name!r} has a turn in progress; wait for its end, or abort it"
            )
        if session is None and len(self._known) >= self.most and not self._idle:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"all {self.most} sessions have a turn in progress; retry later or raise --max-sessions",
            )

    def begin(self, name: str, seq_id: int) -> None:
        """Starts a turn, for which `check` was passed."""
        session = self._known.get(name)
        if session is None:
            if len(self._known) >= self.most:
                self._evict(next(iter(self._idle.values())))
            session = self._known[name] = Session(name)
        self._idle.pop(name, None)
        session.turn = seq_id

    def follow(self, name: str, seq_id: int, path: list[int]) -> None:
        """The turn starts from these pages: those of the session that are not among them hold what was never said.
        Nothing if the session has ended meanwhile."""
        session = self._known.get(name)
        if session is None or session.turn != seq_id:
            return
        common = 0
        for mine, matched in zip(session.pages, path, strict=False):
            if mine != matched:
                break
            common += 1
        self._hold(session, session.pages[:common])

    def leave(self, name: str, seq_id: int, now: float, path: list[int] | None) -> None:
        """Ends a turn, after which the session keeps these pages, all in the tree. None: it did not run, so they are
        what they were, and a session without any ends. Nothing if it has ended meanwhile."""
        session = self._known.get(name)
        if session is None or session.turn != seq_id:
            return
        if path is not None:
            self._hold(session, path)
        session.turn = None
        session.idle_since = now
        self._idle[name] = session
        if session.ending or (path is None and not session.pages):
            self._drop(session)

    def end(self, name: str) -> bool:
        """Ends a session, now or with its turn; whether there was one."""
        session = self._known.get(name)
        if session is None:
            return False
        session.ending = True
        if session.turn is None:
            self._drop(session)
        return True

    def expire(self, now: float) -> None:
        """Ends those that have been idle for too long."""
        while self._idle:
            session = next(iter(self._idle.values()))
            if now - session.idle_since < self.ttl:
                return
            self._drop(session)

    def relieve(self) -> bool:
        """Gives up the pages of one session, an idle one if any of those has pages; False if none has."""
        for session in self._idle.values():
            if session.pages:
                self._evict(session)
                return True
        for session in self._known.values():
            if session.pages:
                self._hold(session, [])
                return True
        return False

    def clear(self) -> None:
        """Forgets all of them; turns in progress go on."""
        for session in self.known:
            self._drop(session)

    def _evict(self, session: Session) -> None:
        self._drop(session)
        self.evicted += 1

    def _drop(self, session: Session) -> None:
        self._hold(session, [])
        del self._known[session.name]
        self._idle.pop(session.name, None)

    def _hold(self, session: Session, pages: list[int]) -> None:
        assert self.tree is not None, f"session {session.name!r} without a prefix cache"
        self.tree.pin(pages)
        self.tree.unpin(session.pages)
        session.pages = list(pages)
