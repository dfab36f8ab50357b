"""Sleep of an engine: the state of its memory, and the calls that change it."""

from collections.abc import Collection

from msgspec import Struct, structs

from tandem.engine_core.contracts import SleepMemory
from tandem.engine_core.errors import SleepError
from tandem.protocol.commands import SLEEP_TAGS, Sleep, SleepTag, WakeUp
from tandem.protocol.events import Answer, AnyEvent, WeightFacts

LEVELS = (1, 2)


class DueSleep(Struct):
    """A sleep that waits for the steps in flight, and with mode `wait` for all requests."""

    command: Sleep
    calls: list[tuple[bytes, int]]
    """Frontends and numbers of the calls that it answers."""


class SleepSwitch:
    """Tags that are asleep, and the sleep or wake that comes next.

    Life of a sleep: `begin` -> the loop drains, as its mode says -> `fall_asleep` -> `wake` of all tags. Nothing is
    computed while a tag is asleep. A sleep that fails leaves everything awake, a wake that fails everything asleep.
    """

    def __init__(self, memory: SleepMemory | None = None) -> None:
        """Start awake. memory: None on an engine that never sleeps."""
        self.memory = memory
        self.asleep: frozenset[SleepTag] = frozenset()
        self.level = 0
        """Level of the last sleep."""
        self.due: DueSleep | None = None
        self.has_dropped_weights = False
        """True if the weights were not filled since a sleep of level 2."""
        self.is_changing = False
        """True while memory is released or restored."""
        self._wakes: list[tuple[bytes, WakeUp]] = []
        self._replies: list[tuple[bytes, AnyEvent]] = []

    @property
    def holds_rows(self) -> bool:
        """True if no step may be launched."""
        return bool(self.asleep) or (self.due is not None and self.due.command.mode != "wait")

    @property
    def refuses_new(self) -> bool:
        """True if requests that arrive are refused."""
        return bool(self.asleep) or self.due is not None

    @property
    def takes_weights(self) -> bool:
        """True if the weights are asleep or about to be, so that they cannot be replaced."""
        return self.due is not None or "weights" in self.asleep

    @property
    def wakes(self) -> bool:
        """True if a call to wake up is to be carried out."""
        return bool(self._wakes)

    def facts(self, weights: WeightFacts) -> WeightFacts:
        """Return the state of the weights with that of the sleep."""
        if self.is_changing:
            return structs.replace(weights, state="changing")
        weights = structs.replace(weights, is_sleep_due=self.due is not None)
        if not self.asleep:
            return weights
        return structs.replace(weights, state="sleeping", asleep=sorted(self.asleep))

    def begin(self, client: bytes, command: Sleep) -> bool:
        """Make a sleep due, or change the mode and level of the one that is due.

        Return False if the engine sleeps already: the call is answered, and nothing changes.
        """
        if self.asleep == SLEEP_TAGS:
            self._reply(client, command.call)
            return False
        calls = [] if self.due is None else self.due.calls
        self.due = DueSleep(command, [*calls, (client, command.call)])
        return True

    def begin_wake(self, client: bytes, command: WakeUp) -> None:
        """Have tags woken at the end of the tick. A sleep that is due is cancelled."""
        due, self.due = self.due, None
        for call in () if due is None else due.calls:
            self._reply(*call, "the engine was woken before it slept")
        self._wakes.append((client, command))

    def is_due(self, in_flight: int, num_open: int) -> bool:
        """Return whether the sleep can begin now.

        in_flight: number of steps; num_open: number of requests without an outcome.
        """
        return self.due is not None and not in_flight and (self.due.command.mode != "wait" or not num_open)

    def fall_asleep(self) -> bool:
        """Release all memory that is awake, with nothing in flight; return whether that succeeded."""
        due, self.due = self.due, None
        assert due is not None and self.memory is not None, "no sleep is due"
        tags = SLEEP_TAGS - self.asleep
        # What a level 2 has dropped is in no copy.
        level = 2 if self.has_dropped_weights else due.command.level
        problem = None
        try:
            self.memory.release(tags, keep_weights=level == 1)
            self.asleep = SLEEP_TAGS
            if "weights" in tags:
                self.level = level
        except SleepError as error:
            problem = error
        for call in due.calls:
            self._reply(*call, problem)
        return problem is None

    @property
    def has_released(self) -> bool:
        """True if a wake has something to restore or to load."""
        return bool(self.asleep) or self.has_dropped_weights

    @property
    def has_folder(self) -> bool:
        """True if a wake of everything loads weights that a sleep of level 2 has dropped."""
        return self.memory is not None and self.memory.has_folder

    def wake(self) -> list[bool]:
        """Carry out the calls to wake up, with nothing in flight if something is asleep.

        Return for each that has restored or loaded dropped weights whether they are complete.
        """
        wakes, self._wakes = self._wakes, []
        found: list[bool] = []
        for client, command in wakes:
            problem = None
            try:
                woken = self._wake(frozenset(tag for tag in SLEEP_TAGS if tag in command.tags) or SLEEP_TAGS)
                found += [] if woken is None else [woken]
            except SleepError as error:
                problem = error
            self._reply(client, command.call, problem)
        return found

    def _wake(self, tags: frozenset[SleepTag]) -> bool | None:
        """Wake tags; return whether dropped weights are complete again, None if there were none. Raises SleepError."""
        assert self.memory is not None, "an engine without memory that sleeps"
        wanted = tags & self.asleep
        if wanted:
            self.memory.restore(wanted)
        has_dropped = self.has_dropped_weights or ("weights" in wanted and self.level == 2)
        has_reloaded = False
        if has_dropped and tags == SLEEP_TAGS:
            try:
                has_reloaded = self.memory.reload()
            except SleepError:
                if wanted:
                    self.memory.release(wanted, keep_weights=False)
                raise
        self.asleep -= wanted
        self.has_dropped_weights = has_dropped and not has_reloaded
        return has_reloaded if has_dropped and (wanted or has_reloaded) else None

    def note_filled(self) -> None:
        """Note that the weights were filled by a swap or an update."""
        self.has_dropped_weights = False

    def take_replies(self) -> list[tuple[bytes, AnyEvent]]:
        """Return the replies since the last call, each with its frontend."""
        replies, self._replies = self._replies, []
        return replies

    def _reply(self, client: bytes, call: int, problem: "SleepError | str | None" = None) -> None:
        is_lack = isinstance(problem, SleepError) and problem.is_lack
        self._replies.append((client, Answer(call, problem is None, str(problem or ""), lacks_memory=is_lack)))


def problem_of(command: Sleep | WakeUp) -> str:
    """Return why a command is not valid, "" if it is."""
    if isinstance(command, Sleep):
        return "" if command.level in LEVELS else f"level is {command.level}, use 1 or 2"
    unknown: Collection[str] = set(command.tags) - SLEEP_TAGS
    return f"unknown tags: {', '.join(sorted(unknown))}; use weights and kv_cache" if unknown else ""
