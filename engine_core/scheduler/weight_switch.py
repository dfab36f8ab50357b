"""The change of the weights that is due, and what it holds up until then."""

from collections.abc import Callable

from tandem.engine_core.contracts import WeightChange
from tandem.engine_core.errors import WeightsError
from tandem.engine_core.weight_version import WeightVersion, number_of
from tandem.protocol.events import AnyEvent, WeightFacts, WeightState

_DROPPED = "a sleep of level 2 has dropped them (POST /wake_up without tags loads them again)"
_LOST = "a sleep of level 2 has dropped those that a trainer had sent, which are in no folder"


class WeightSwitch:
    """State of the weights, and the change that waits for the steps in flight.

    Life of a change: `begin` -> the loop drains, as `WeightChange.running` says -> `apply`. Or it is cancelled before,
    by `cancel` or at its deadline.
    """

    def __init__(self, name: str = "", highest: int = 0) -> None:
        """Start with complete weights. name: of their version; highest: number of a version of an engine before."""
        self.version = WeightVersion(0, name)
        self.highest = max(highest, number_of(name))
        """Highest number that a version has had, also in engines before this one."""
        self.on_number: Callable[[int], None] = lambda _: None
        """Called with a new highest number before weights of that version are used."""
        self.is_complete = True
        """False if some tensors may be of other weights than the rest: nothing may be computed."""
        self.problem = ""
        """Reason of a change that failed half-way, until another one completes the weights."""
        self.change: WeightChange | None = None
        """Change that is due, if any."""
        self._replies: list[tuple[bytes, AnyEvent]] = []

    @property
    def holds_rows(self) -> bool:
        """True if no step may be launched."""
        return not self.is_complete or (self.change is not None and self.change.running != "wait")

    @property
    def next_name(self) -> str:
        """Default name of the next version, which no weights had before."""
        return str(self.highest + 1)

    @property
    def facts(self) -> WeightFacts:
        """The state of the weights, for frontends."""
        state: WeightState = "ready" if self.is_complete else "incomplete"
        if self.change is not None:
            state = "changing"
        return WeightFacts(self.version.name, state, self.problem)

    def begin(self, change: WeightChange) -> None:
        """Make a change due; none may be."""
        assert self.change is None, f"{change} while {self.change} is due"
        self.change = change

    def is_due(self, in_flight: int, num_begun: int) -> bool:
        """Return whether the change can be applied now.

        in_flight: number of steps; num_begun: number of sequences of requests that have begun.
        """
        return self.change is not None and not in_flight and (self.change.running != "wait" or not num_begun)

    def apply(self) -> bool:
        """Apply the change that is due, with nothing in flight; return whether other weights are used now."""
        change, self.change = self.change, None
        assert change is not None, "no change is due"
        try:
            name = change.apply()
        except WeightsError as error:
            if not error.is_intact:
                self.is_complete, self.problem = False, str(error)
            change.finish(str(error))
            return False
        self.is_complete = name is not None
        if name is not None:
            self.version, self.problem = WeightVersion(self.version.number + 1, name), ""
            if (number := number_of(name)) > self.highest:
                self.highest = number
                self.on_number(number)
        change.finish("")
        return name is not None

    def note_woken(self, is_complete: bool, has_folder: bool) -> None:
        """Record whether weights that a sleep dropped are back.

        is_complete: False if they were not loaded again; has_folder: True if they can be.
        """
        self.is_complete = is_complete
        self.problem = "" if is_complete else _DROPPED if has_folder else _LOST

    def reply(self, client: bytes, event: AnyEvent) -> None:
        """Send an event to a frontend at the end of the tick."""
        self._replies.append((client, event))

    def take_replies(self) -> list[tuple[bytes, AnyEvent]]:
        """Return the replies since the last call, each with its frontend."""
        replies, self._replies = self._replies, []
        return replies

    def cancel(self, problem: str) -> bool:
        """Drop the change that is due; return whether there was one. problem: the reason."""
        change, self.change = self.change, None
        if change is not None:
            change.finish(problem)
        return change is not None
