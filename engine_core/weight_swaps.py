"""Swaps: the weights of another checkpoint take the place of those that serve."""

import logging
from collections.abc import Callable

from tandem.engine_core.contracts import CheckpointStager, RunningMode, WeightChange
from tandem.engine_core.errors import WeightsError
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.protocol.commands import SWAP_MODES, CancelSwap, InspectSwap, SwapMode, SwapWeights
from tandem.protocol.events import Answer, SwapFacts, SwapState
from tandem.protocol.logs import printable

logger = logging.getLogger(__name__)

MAX_GRACE = 86_400.0
MAX_VERSION_BYTES = 256


class CheckpointSwap:
    """One swap that activates a checkpoint; implements `contracts.WeightChange`."""

    def __init__(
        self, running: SwapMode, deadline: float, apply: Callable[[], str], finish: Callable[[str], None]
    ) -> None:
        self.running: RunningMode = running
        self.deadline = deadline
        self._apply = apply
        self._finish = finish

    def apply(self) -> str | None:
        return self._apply()

    def finish(self, problem: str) -> None:
        self._finish(problem)


class WeightSwaps:
    """The swap in progress. Runs on the loop's thread and knows neither files nor device.

    Life of a swap: `swap` -> staging -> (staged, until another `swap` of the same path) -> draining -> its weights
    serve. A problem, or `cancel`, ends it at any time before: the weights stay as they are.
    """

    def __init__(
        self,
        switch: WeightSwitch,
        stager: CheckpointStager,
        load: Callable[[str, Callable[[int, int], None]], None],
        active_path: Callable[[], str],
        save: Callable[[str, str], None],
    ) -> None:
        """Start without a swap.

        load: replaces the weights by those of a staged checkpoint, given its path and a callback for progress, which
        gets the bytes loaded so far and those of the checkpoint; raises WeightsError. active_path: returns the folder
        of the weights in memory, "" if they are in none; save: stores the path and the version of the weights after a
        swap.
        """
        self.switch = switch
        self.stager = stager
        self.load = load
        self.save = save
        self.active_path = active_path
        self.on_load: Callable[[], None] = lambda: None
        """Called before weights are loaded."""
        self.problem = ""
        """Reason why the last swap failed."""
        self._state: SwapState = "idle"
        self._percent_loaded = 0
        self._command: SwapWeights | None = None
        self._client = b""

    @property
    def facts(self) -> SwapFacts:
        """The state of the swap, for frontends. Heartbeats read it on a thread of their own."""
        state, command, version = self._state, self._command, self.switch.version.name
        if command is None:
            return SwapFacts("idle", "", 0, self.active_path(), version, self.problem)
        percent = self._percent_loaded if state == "loading" else self.stager.progress()
        return SwapFacts(state, command.path, percent, self.active_path(), version, self.problem)

    @property
    def is_activating(self) -> bool:
        """True if a swap in progress ends with other weights."""
        command = self._command
        return self._state in ("draining", "loading") or (
            self._state == "staging" and command is not None and command.activate
        )

    def apply(self, client: bytes, command: SwapWeights | CancelSwap | InspectSwap) -> Answer | None:
        """Apply a command; return its answer, None if it comes later."""
        problem = ""
        if isinstance(command, SwapWeights):
            problem = self._begin(client, command)
            if not problem:
                return None
        elif isinstance(command, CancelSwap):
            problem = self._cancel()
        return Answer(command.call, not problem, problem, swap=self.facts)

    def _begin(self, client: bytes, command: SwapWeights) -> str:
        """Begin a swap, or activate what is staged; return the reason if that is refused."""
        if command.running not in SWAP_MODES:
            return f"running is {str(command.running)[:64]!r}; use one of {', '.join(SWAP_MODES)}"
        if not 0 <= command.grace <= MAX_GRACE:
            return f"grace is {command.grace}, 0 to {MAX_GRACE:g} seconds"
        if len(command.version.encode()) > MAX_VERSION_BYTES:
            return f"a version has at most {MAX_VERSION_BYTES} bytes in UTF-8"
        if command.activate and command.version and command.version == self.switch.version.name:
            return _in_use(command.version)
        staged = self._command
        if self._state in ("staging", "draining") and staged is not None:
            return f"a swap to {staged.path} is in progress; wait for its end, or cancel it"
        is_staged = self._state == "staged" and staged is not None and staged.path == command.path
        self._command, self._client, self.problem = command, client, ""
        if not is_staged:
            self._state = "staging"
            self.stager.start(command.path, command.root)
        elif command.activate:
            self._state = "staging"  # It has been: `advance` finds the result.
        else:
            self._end("")
        return ""

    def advance(self, now: float) -> WeightChange | None:
        """Take the result of the stager; return the change to begin, if there is one. now: seconds."""
        command = self._command
        if self._state != "staging" or command is None or (problem := self.stager.result()) is None:
            return None
        if problem:
            self._end(problem)
            return None
        if not command.activate:
            self._state = "staged"
            self._reply("")
            return None
        if self.switch.change is not None:
            return None
        self._state = "draining"
        return CheckpointSwap(command.running, now + command.grace, self._activate, self._end)

    def _activate(self) -> str:
        command = self._command
        assert command is not None
        if command.version and command.version == self.switch.version.name:  # An update may have taken it meanwhile.
            raise WeightsError(_in_use(command.version), is_intact=True)
        self._percent_loaded, self._state = 0, "loading"
        self.on_load()
        self.load(command.path, self._note_loaded)
        return command.version or self.switch.next_name

    def _note_loaded(self, done: int, total: int) -> None:
        self._percent_loaded = done * 100 // max(1, total)

    def _end(self, problem: str) -> None:
        """Note that the swap is over."""
        command = self._command
        assert command is not None
        if self._state == "loading" and not problem:
            logger.info("weights of %s, version %s", command.path, self.switch.version.name)
            self.save(command.path, self.switch.version.name)
        if problem:
            logger.error("%s was not swapped in: %s", command.path, problem)
        is_staged = self._state == "staged" and not problem
        self.problem = problem
        if not is_staged:
            self._state, self._command = "idle", None
            self.stager.release()
        self._reply(problem, command)

    def _cancel(self) -> str:
        """Cancel the swap; return the reason if there is none."""
        if self._state == "idle":
            return "no swap is in progress, and nothing is staged"
        if self._state == "draining":
            self.switch.cancel("the swap was cancelled")
            return ""
        self.stager.cancel()
        if self._state == "staging":
            self._end("the swap was cancelled")
        self._state, self._command = "idle", None
        self.stager.release()
        return ""

    def _reply(self, problem: str, command: SwapWeights | None = None) -> None:
        command = command or self._command
        assert command is not None
        self.switch.reply(self._client, Answer(command.call, not problem, problem, swap=self.facts))


def _in_use(version: str) -> str:
    return f"version {printable(version)} is that of the weights which serve; give those of the checkpoint another"
