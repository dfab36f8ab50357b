"""Updates of the weights by a trainer, in the order of vLLM's calls: initialize, start, update, finish.

A thread joins the group, since that waits for the trainer. Tensors are received by the loop itself, with nothing in
flight: `WeightSwitch` decides when, and what happens to the sequences.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Protocol

import torch
from msgspec import Struct

from tandem.engine_core.contracts import RunningMode, UpdateCommand, WeightChange
from tandem.engine_core.errors import ConfigError, WeightsError
from tandem.engine_core.loader.slots import Loadable, WeightSlot
from tandem.engine_core.weight_updates.group import GroupInfo, TransferError, TransferGroup
from tandem.engine_core.weight_updates.tensors import TensorSpec, packed, tensor_specs, unpacked
from tandem.engine_core.weight_updates.update_slots import UpdateSlots
from tandem.engine_core.weight_version import WeightVersion
from tandem.protocol.commands import FinishWeightUpdate, InitWeightTransfer, StartWeightUpdate, UpdateWeights
from tandem.protocol.logs import printable

logger = logging.getLogger(__name__)

Reply = Callable[[str], None]
"""Answers a call with its problem; "": it has succeeded."""
MAX_NAMED = 5


class ModelParts(Protocol):
    """The weights of a model, as an update sees them."""

    @property
    def model(self) -> Loadable:
        """The model."""

    def slots(self) -> list[WeightSlot]:
        """Return the slots of a new filling, after which `finish` is needed."""

    def finish(self, slots: list[WeightSlot]) -> None:
        """Run the callbacks of filled slots. Raises ConfigError."""


class Switch(Protocol):
    """The change of the weights that is due."""

    change: WeightChange | None
    problem: str
    version: WeightVersion

    @property
    def next_name(self) -> str:
        """Default name of the next version."""

    def begin(self, change: WeightChange) -> None:
        """Make a change due; none may be."""


class PendingGroup(Struct):
    """A group that is being joined."""

    future: "Future[TransferGroup]"
    reply: Reply


class ExternalUpdates:
    """State of the group and of the update in progress."""

    def __init__(
        self,
        switch: Switch,
        model: ModelParts,
        rename: Callable[[str], str | None],
        join: Callable[[GroupInfo, float], TransferGroup],
        device: torch.device,
        timeout: float,
        wake: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """Keep the parts.

        rename: as in `UpdateSlots`; join: joins a group within a number of seconds; timeout: seconds of a call
        (--update-timeout); wake: ends the wait of the loop; on_change: called before weights are other than those on
        disk.
        """
        self.switch = switch
        self.model = model
        self.rename = rename
        self.device = device
        self.timeout = timeout
        self.on_change = on_change
        self.slots: UpdateSlots | None = None
        """Slots of the update in progress, once tensors arrive."""
        self._join = join
        self._wake = wake
        self._pending: PendingGroup | None = None
        self._group: TransferGroup | None = None
        self._buffer_bytes = 0
        self._announced: UpdateSlots | None = None
        """Slots that announced tensors are checked against; None: no update was started."""
        self._may_send = False
        """True from the start of an update to its finish, or to the end of the group."""
        self._last: tuple[TensorSpec, ...] = ()

    @property
    def is_receiving(self) -> bool:
        return self.slots is not None

    def call(self, command: UpdateCommand, running: RunningMode, reply: Reply) -> None:
        """Carry out a call; it is answered now or later. running: effect of new weights on running sequences."""
        match command:
            case InitWeightTransfer():
                self._init(command, reply)
            case StartWeightUpdate():
                reply(self._start())
            case UpdateWeights():
                self._update(command, running, reply)
            case FinishWeightUpdate(_, version):
                self._finish(version, running, reply)

    def refuse(self, command: UpdateCommand, problem: str) -> str:
        """Return the text of a refusal. One of tensors closes the group if an update was started.

        The trainer may be sending them already, and the next call would receive them in place of its own. What is sent
        while a call for tensors is due belongs to that call, which then goes on.
        """
        if not isinstance(command, UpdateWeights) or not self._may_send or isinstance(self.switch.change, Receive):
            return problem
        self.close()
        return f"{problem}\n  The group was closed; initialize it again"

    def advance(self) -> None:
        """Take a group that has been joined."""
        pending = self._pending
        if pending is None or not pending.future.done():
            return
        self._pending = None
        try:
            self._group = pending.future.result()
        except Exception as error:  # The libraries of groups raise errors of their own.
            logger.warning("no group with a trainer: %s", error)
            pending.reply(_text(error))
            return
        logger.info("joined the group of a trainer")
        pending.reply("")

    def close(self) -> None:
        """Leave the group."""
        self._may_send = False
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _init(self, command: InitWeightTransfer, reply: Reply) -> None:
        if self._pending is not None:
            reply("a group is being joined already; wait for that call")
            return
        if self.switch.change is not None:
            reply("another change of the weights is in progress; wait for its end")
            return
        if not 0 < command.rank < command.world_size:
            reply(f"rank {command.rank} is not between 1 and world_size - 1 ({command.world_size - 1})")
            return
        self.leave()
        self._buffer_bytes = command.buffer_bytes
        info = GroupInfo(command.rank, command.world_size, command.address, command.port, command.unique_id)
        self._pending = PendingGroup(Future(), reply)
        Thread(target=self._run_join, args=(info, self._pending.future), daemon=True, name="join-trainer").start()

    def _run_join(self, info: GroupInfo, future: "Future[TransferGroup]") -> None:
        try:
            future.set_result(self._join(info, self.timeout))
        except Exception as error:
            future.set_exception(error)
        self._wake()

    def _start(self) -> str:
        if self._group is None:
            return "no group of a trainer was initialized; call /init_weight_transfer_engine first"
        if self.switch.change is not None:
            return "another change of the weights is in progress; wait for its end"
        try:
            slots = self.model.model.weight_slots()
        except Exception as error:  # Some slots are of temporary tensors: a lack of memory, above all.
            logger.exception("no update was started")
            return f"an update could not be started: {_text(error)}"
        self._announced, self.slots, self._may_send = UpdateSlots(slots, self.rename), None, True
        return ""

    def _update(self, command: UpdateWeights, running: RunningMode, reply: Reply) -> None:
        if command.is_refused:
            reply(self.refuse(command, "the call was not valid"))
            return
        if self._announced is None or self._group is None:
            reply(self.refuse(command, "no update was started; call /start_weight_update first"))
            return
        if self.switch.change is not None:
            reply(self.refuse(command, "another change of the weights is in progress; wait for its end"))
            return
        try:
            specs = self._last
            if command.names:
                specs = tensor_specs(command.names, command.dtypes, command.shapes)
            if not specs:
                raise ConfigError("no tensors are named; only a later call may leave them out")
            self._announced.check(specs)
        except ConfigError as error:
            reply(self.refuse(command, str(error)))
            return
        self._last = specs
        given = command.buffer_bytes
        buffer_bytes = self._buffer_bytes if given is None else given
        self.switch.begin(Receive(self, self._group, specs, buffer_bytes, running, reply))

    def _finish(self, version: str, running: RunningMode, reply: Reply) -> None:
        slots = self.slots
        if slots is None:
            problem = self.switch.problem
            nothing = "no weights were received since /start_weight_update; there is nothing to finish"
            reply(f"the weights are incomplete: {problem}; update them completely" if problem else nothing)
            return
        if self.switch.change is not None:
            reply("another change of the weights is in progress; wait for its end")
            return
        if version and version == self.switch.version.name:
            reply(f"version {printable(version)} is that of the weights before; finish with another")
            return
        self.abandon()
        self._may_send = False
        self.switch.begin(Finish(self.model, slots, version or self.switch.next_name, running, reply))

    def abandon(self) -> None:
        """Abandon the update in progress, and keep the group."""
        self._announced = self.slots = None

    def leave(self) -> None:
        """Abandon the update in progress, and leave its group."""
        self.abandon()
        self.close()


class Receive:
    """Implement `WeightChange`: receive tensors into the storage of the model."""

    def __init__(
        self,
        updates: ExternalUpdates,
        group: TransferGroup,
        specs: Sequence[TensorSpec],
        buffer_bytes: int,
        running: RunningMode,
        reply: Reply,
    ) -> None:
        self.updates = updates
        self.group = group
        self.specs = specs
        self.buffer_bytes = buffer_bytes
        self.running = running
        self.deadline = time.monotonic() + updates.timeout
        self._reply = reply

    def apply(self) -> str | None:
        deadline = time.monotonic() + self.updates.timeout
        updates = self.updates
        buffer: torch.Tensor | None = None
        try:
            updates.on_change()
            if updates.slots is None:
                updates.slots = UpdateSlots(updates.model.slots(), updates.rename)
            for chunk in packed(self.specs, self.buffer_bytes):
                size = sum(spec.nbytes for spec in chunk)
                if buffer is None or len(buffer) < size:
                    buffer = torch.empty(size, dtype=torch.uint8, device=updates.device)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferError(f"the trainer has not sent all within {updates.timeout:g} s")
                self.group.receive(buffer[:size], left)
                for spec, tensor in zip(chunk, unpacked(buffer, chunk), strict=True):
                    updates.slots.write(spec.name, tensor)
        except Exception as error:  # After any error the weights are incomplete, and the engine continues.
            if not isinstance(error, TransferError | ConfigError):
                logger.exception("an update failed")
            updates.leave()
            raise WeightsError(f"an update failed: {_text(error)}", is_intact=False) from error
        return None

    def finish(self, problem: str) -> None:
        if problem:  # Perhaps it was cancelled, and the trainer sends nevertheless.
            self.updates.close()
        self._reply(problem)


class Finish:
    """Implement `WeightChange` for an update of which all tensors were received."""

    def __init__(self, model: ModelParts, slots: UpdateSlots, version: str, running: RunningMode, reply: Reply) -> None:
        self.model = model
        self.slots = slots
        self.version = version
        self.running = running
        self.deadline = float("inf")
        self._reply = reply

    def apply(self) -> str | None:
        if missing := self.slots.missing:
            names = ", ".join(missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
            raise WeightsError(f"an update lacked {len(missing)} tensors: {names}", is_intact=False)
        try:
            self.model.finish(self.slots.slots)
        except Exception as error:  # Callbacks of layers compute with what the trainer sent.
            if not isinstance(error, ConfigError):
                logger.exception("an update could not be finished")
            raise WeightsError(f"an update could not be finished: {_text(error)}", is_intact=False) from error
        return self.version

    def finish(self, problem: str) -> None:
        self._reply(problem)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
