"""Fakes and real classes have the signatures of the ports that they implement."""

import inspect
from typing import Any, get_type_hints

import pytest

from tandem.engine_core import contracts
from tandem.engine_core.constraints.compiler import GrammarCompiler
from tandem.engine_core.constraints.grammar_advancer import BatchAdvancer
from tandem.engine_core.constraints.grammars import GrammarConstraint
from tandem.engine_core.lora.adapter_loader import ThreadedLoader
from tandem.engine_core.memory.sleeping_memory import SleepingMemory
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.checkpoint_stager import ProcessStager
from tandem.engine_core.weight_swaps import CheckpointSwap
from tandem.engine_core.weight_updates.external_updates import ExternalUpdates
from tandem.engine_core.wire.mailbox import ZmqMailbox
from tandem.frontend.supervisor.frontends.frontend_child import FrontendChild
from tandem.frontend.supervisor.frontends.frontend_process import Child
from tests.fakes.adapter_loader import FakeAdapterLoader
from tests.fakes.checkpoint_stager import FakeStager
from tests.fakes.constraint import FakeAdvancer, FakeCompiler, FakeConstraint
from tests.fakes.frontend_child import FakeFrontendChild
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.runtime import FakeRuntime
from tests.fakes.sleep_memory import FakeSleepMemory
from tests.fakes.weight_change import FakeWeightChange

PAIRS: list[tuple[type, type]] = [
    (FakeRuntime, contracts.Runtime),
    (TorchRuntime, contracts.Runtime),
    (FakeMailbox, contracts.Mailbox),
    (ZmqMailbox, contracts.Mailbox),
    (FakeConstraint, contracts.Constraint),
    (GrammarConstraint, contracts.Constraint),
    (FakeAdvancer, contracts.GrammarAdvancer),
    (BatchAdvancer, contracts.GrammarAdvancer),
    (FakeCompiler, contracts.Compiler),
    (GrammarCompiler, contracts.Compiler),
    (FakeAdapterLoader, contracts.AdapterLoader),
    (ThreadedLoader, contracts.AdapterLoader),
    (FakeWeightChange, contracts.WeightChange),
    (ExternalUpdates, contracts.WeightUpdates),
    (CheckpointSwap, contracts.WeightChange),
    (FakeStager, contracts.CheckpointStager),
    (ProcessStager, contracts.CheckpointStager),
    (FakeSleepMemory, contracts.SleepMemory),
    (SleepingMemory, contracts.SleepMemory),
    (FakeFrontendChild, Child),
    (FrontendChild, Child),
]


def members(port: type) -> list[str]:
    return [name for name in vars(port) if not name.startswith("_")]


CASES = [(kind, port, name) for kind, port in PAIRS for name in members(port)]


def shape(owner: type, name: str) -> Any:
    """Return kind, parameters and resolved annotations of a member."""
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        assert member.fget is not None
        return ("property", get_type_hints(member.fget))
    function = inspect.unwrap(getattr(owner, name))
    parameters = [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
    return ("method", parameters, get_type_hints(function))


@pytest.mark.parametrize(("kind", "port", "name"), CASES, ids=[f"{k.__name__}.{n}" for k, _, n in CASES])
def test_member_has_the_signature_of_its_port(kind: type, port: type, name: str) -> None:
    assert hasattr(kind, name), f"{kind.__name__} lacks {name}"
    assert shape(kind, name) == shape(port, name)


def test_every_port_is_checked() -> None:
    ports = {value for value in vars(contracts).values() if getattr(value, "_is_protocol", False)}
    own = {port for port in ports if port.__module__ == contracts.__name__}
    assert own == {port for _, port in PAIRS} - {Child}


def test_renamed_parameter_is_a_difference() -> None:
    class Renamed:
        def launch(self, slot: int, step: object) -> None: ...

    assert shape(Renamed, "launch") != shape(contracts.Runtime, "launch")
