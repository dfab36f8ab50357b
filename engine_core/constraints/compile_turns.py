"""Order in which grammars get a thread, fair between API keys."""

from collections import OrderedDict


class CompileTurns:
    """Grammars that wait for one of a few threads, by API key.

    Keys take turns, and none has all threads: a compilation cannot be stopped, and one of each key with slow grammars
    would otherwise hold up those of others for seconds. Requests without a key are as one that may have all.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._waiting: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """Waiting grammars of each key in their order; the key whose turn is next comes first."""
        self._running: dict[str, str] = {}
        """Key of each grammar that has a thread."""

    def add(self, key: str, grammar: str) -> None:
        """Let a grammar wait for its turn.

        One that several keys wait for takes the first turn of any of them.
        """
        self._waiting.setdefault(key, OrderedDict())[grammar] = None

    def remove(self, grammar: str) -> None:
        """Let a grammar wait no more."""
        for key in list(self._waiting):
            self._waiting[key].pop(grammar, None)
            if not self._waiting[key]:
                del self._waiting[key]

    def take(self) -> str | None:
        """Give a free thread to the grammar whose turn it is, and return that.

        Return None if no thread is free, or no grammar may have it.
        """
        if len(self._running) >= self._num_threads:
            return None
        for key, grammars in self._waiting.items():
            if self._may_have_another(key):
                grammar = next(iter(grammars))
                self._waiting.move_to_end(key)
                self.remove(grammar)
                self._running[grammar] = key
                return grammar
        return None

    def end(self, grammar: str) -> None:
        """Take back the thread of a grammar."""
        del self._running[grammar]

    def close(self) -> None:
        """Give no more threads."""
        self._num_threads = 0

    def _may_have_another(self, key: str) -> bool:
        most = max(self._num_threads - 1, 1) if key else self._num_threads
        return sum(holder == key for holder in self._running.values()) < most
