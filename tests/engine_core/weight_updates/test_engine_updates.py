"""Updates of a whole engine by a trainer over gloo, in one process."""

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from tandem.engine_core.startup import model_weights
from tandem.engine_core.weight_updates.external_updates import ExternalUpdates
from tandem.engine_core.weight_updates.update_slots import UpdateSlots
from tandem.protocol.commands import (
    InitWeightTransfer,
    ResetPrefixCache,
    StartWeightUpdate,
    SwapWeights,
    UpdateWeights,
)
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Answer, Failure, Finished
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_llama import save_random
from tests.fakes.checkpoint_stager import FakeStager
from tests.support.engine_driver import CLIENT, DrivenEngine
from tests.support.gloo_trainer import packed_broadcast
from tests.support.serving import until
from tests.support.trained_engine import SIZES, TrainedEngine, described

LENGTH = 12
PROMPT = list(range(5, 45))


def params(length: int = LENGTH) -> SamplingParams:
    return SamplingParams(length, temperature=0.0, ignore_eos=True)


def generate(trained: TrainedEngine) -> list[int]:
    return trained.driven.generate([PROMPT], [params()])[0]


def weights_of(folder: Path) -> dict[str, Tensor]:
    from transformers import LlamaForCausalLM

    return {name: value.detach() for name, value in LlamaForCausalLM.from_pretrained(folder).named_parameters()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for seed in (1, 2):
        directory = tmp_path_factory.mktemp(f"model{seed}")
        save_random(directory, {"max_position_embeddings": 512}, seed=seed)
        found.append(directory)
    return found


def expected(folder: Path, prompt: list[int] = PROMPT, length: int = LENGTH) -> list[int]:
    """Return the answer of an engine that loads the folder."""
    return DrivenEngine.build(EngineOptions(model=str(folder), **SIZES)).generate([prompt], [params(length)])[0]


@pytest.mark.parametrize("buffer_bytes", [0, 3000, 2**30])
def test_an_updated_engine_answers_as_one_that_loaded_the_weights(folders: list[Path], buffer_bytes: int) -> None:
    first, second = (expected(folder) for folder in folders)
    assert first != second
    trained = TrainedEngine(folders[0])
    swaps = trained.driven.engine.control.swaps
    assert swaps is not None and swaps.facts.active_path == str(folders[0])
    assert generate(trained) == first
    trained.pause()
    trained.init(buffer_bytes)
    trained.update(weights_of(folders[1]), "v2")
    assert swaps.facts.active_path == "", "the weights are in memory only"
    assert trained.driven.engine.control.weights.version.name == "v2"
    trained.resume()
    assert generate(trained) == second
    trained.pause()
    trained.start()
    assert trained.send(weights_of(folders[0]), named=False).ok
    assert trained.finish().ok
    trained.resume()
    assert generate(trained) == first


def test_versions_of_updates_are_not_given_twice(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    weights, numbers = trained.driven.engine.control.weights, list[int]()
    weights.on_number = numbers.append
    trained.pause()
    trained.init()
    trained.update(tensors)
    trained.update(tensors, "5")
    trained.start()
    assert trained.send(tensors).ok
    answer = trained.finish("5")
    assert not answer.ok and "5" in answer.message
    assert trained.finish().ok
    assert (weights.version.name, numbers) == ("6", [1, 5, 6])


def test_parts_of_an_update_come_in_several_calls(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause()
    trained.init()
    trained.start()
    names = list(tensors)
    for part in (names[:3], names[3:]):
        assert trained.send({name: tensors[name] for name in part}).ok
    assert trained.finish().ok
    trained.resume()
    assert generate(trained) == expected(folders[1])


def test_a_partial_update_leaves_the_weights_incomplete_until_a_full_one(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause()
    trained.init()
    trained.start()
    assert trained.send(dict(list(tensors.items())[:-1])).ok
    answer = trained.finish()
    assert not answer.ok and list(tensors)[-1] in answer.message
    assert not trained.finish().ok, "a second call cannot complete it"
    trained.resume()
    request = trained.driven.submit(PROMPT, params())
    trained.driven.run()
    outcome = trained.driven.outcome(request)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
    trained.pause()
    trained.update(tensors)
    trained.resume()
    assert generate(trained) == expected(folders[1])


@pytest.mark.parametrize("call", ["init", "start"])
def test_an_abandoned_update_is_the_reason_of_incomplete_weights(folders: list[Path], call: str) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    weights = trained.driven.engine.control.weights
    trained.pause()
    trained.init()
    trained.start()
    assert trained.send(dict(list(tensors.items())[:3])).ok
    held = trained.driven.submit(PROMPT, params())
    getattr(trained, call)()
    outcome = trained.driven.outcome(held)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
    problem = weights.facts.problem
    assert weights.facts.state == "incomplete" and problem
    answer = trained.finish()
    assert not answer.ok and problem in answer.message
    trained.update(tensors)
    assert (weights.facts.state, weights.facts.problem) == ("ready", "")


def test_a_resume_in_the_middle_of_an_update_ends_every_request(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause()
    trained.init()
    held = trained.driven.submit(PROMPT, params())
    trained.start()
    assert trained.send(tensors).ok
    trained.resume()
    new = trained.driven.submit(PROMPT, params())
    trained.driven.run()
    for request in (held, new):
        outcome = trained.driven.outcome(request)
        assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
    trained.pause()
    assert not trained.finish().ok
    trained.update(tensors)
    trained.resume()
    assert generate(trained) == expected(folders[1])


def test_a_swap_ends_an_update_in_progress(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    control, stager = trained.driven.engine.control, FakeStager()
    assert control.swaps is not None
    control.swaps.stager, control.swaps.load = stager, lambda *_: setattr(stager, "outcome", None)
    trained.pause()
    trained.init()
    trained.start()
    assert trained.send(tensors).ok
    assert trained.call(
        lambda call: SwapWeights(call, str(folders[0]), "restart", version="swapped"),
        lambda: until(lambda: stager.paths and setattr(stager, "outcome", "") is None, "the stager"),
    ).ok
    assert not trained.finish().ok, "its tensors are gone"
    assert (control.weights.version.name, control.weights.is_complete) == ("swapped", True)
    trained.update(tensors, "v2")
    assert control.weights.version.name == "v2"


def test_an_error_of_torch_during_an_update_does_not_end_the_engine(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause("wait")
    trained.init(2**30)
    trained.start()
    with monkeypatch.context() as patched:
        patched.setattr(UpdateSlots, "write", Mock(side_effect=RuntimeError("can't allocate memory")))
        answer = trained.send(tensors)
    assert not answer.ok and "allocate" in answer.message
    trained.init()
    trained.update(tensors)
    trained.resume()
    assert generate(trained) == expected(folders[1])


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error"), ValueError("a bad scale"), AssertionError(), MemoryError()]
)
def test_an_error_while_an_update_is_finished_does_not_end_the_engine(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause()
    trained.init()
    trained.start()
    assert trained.send(tensors).ok
    with monkeypatch.context() as patched:
        patched.setattr(model_weights, "finish", Mock(side_effect=error))
        answer = trained.finish()
    assert not answer.ok and (str(error) or type(error).__name__) in answer.message
    assert not trained.finish().ok
    trained.resume()
    request = trained.driven.submit(PROMPT, params())
    trained.driven.run()
    outcome = trained.driven.outcome(request)
    assert isinstance(outcome, Failure) and outcome.code is ErrorCode.WEIGHTS_CHANGED
    trained.pause()
    trained.update(tensors)
    trained.resume()
    assert generate(trained) == expected(folders[1])


def test_a_mark_that_cannot_be_written_does_not_end_the_engine(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    updates = trained.driven.engine.control.updates
    assert isinstance(updates, ExternalUpdates)
    trained.pause()
    trained.init()
    trained.start()
    note, updates.on_change = updates.on_change, Mock(side_effect=OSError("no space left"))
    answer = trained.call(lambda call: UpdateWeights(call, *described(tensors)))
    assert not answer.ok and "no space left" in answer.message
    updates.on_change = note
    trained.init()
    trained.update(tensors)
    trained.resume()
    assert generate(trained) == expected(folders[1])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: {**tensors, "model.extra.weight": torch.zeros(2)}, "model.extra.weight"),
        (lambda tensors: {**tensors, "model.norm.weight": torch.zeros(3)}, "model.norm.weight"),
        (lambda tensors: {**tensors, "model.norm.weight": tensors["model.norm.weight"].int()}, "I32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_the_first_byte(
    folders: list[Path], change: Callable[[dict[str, Tensor]], dict[str, Tensor]], word: str
) -> None:
    trained = TrainedEngine(folders[0])
    trained.pause()
    trained.init()
    trained.start()
    names, dtypes, shapes = described(change(weights_of(folders[1])))
    answer = trained.call(lambda call: UpdateWeights(call, names, dtypes, shapes))
    assert not answer.ok and word in answer.message
    assert not trained.finish().ok
    trained.resume()
    assert generate(trained) == expected(folders[0]), "the weights are as they were"


def test_calls_out_of_order_are_refused(folders: list[Path]) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    announced = described(tensors)
    trained.pause()
    assert not trained.call(StartWeightUpdate).ok, "no group"
    trained.resume()
    trained.init()
    assert not trained.call(StartWeightUpdate).ok, "it runs"
    trained.pause()
    assert not trained.call(lambda call: UpdateWeights(call, *announced)).ok
    assert not trained.finish().ok
    trained.start()
    assert not trained.finish().ok, "nothing was received"
    trained.resume()
    assert generate(trained) == expected(folders[0])


@pytest.mark.parametrize("reason", ["runs", "sleeps", "swapped", "unknown tensor", "not valid", "other change"])
def test_a_refused_call_for_tensors_closes_the_group(folders: list[Path], reason: str) -> None:
    """What the trainer is sending already must not be received by the next call."""
    trained, (names, dtypes, shapes) = TrainedEngine(folders[0]), described(weights_of(folders[1]))
    control = trained.driven.engine.control
    trained.pause()
    trained.init()
    trained.start()
    if reason == "runs":
        trained.resume()
    elif reason == "sleeps":
        control.sleep.asleep = frozenset({"weights"})
    elif reason == "swapped":
        assert control.updates is not None
        control.updates.abandon()  # The trainer does not know.
    elif reason == "unknown tensor":
        names = ["unknown", *names[1:]]
    elif reason == "other change":
        control.weights.change = Mock(running="wait", deadline=float("inf"))
    answer = control.apply(CLIENT, UpdateWeights(900, names, dtypes, shapes, is_refused=reason == "not valid"))
    if answer is None:
        _, answer = control.weights.take_replies()[-1]
    assert isinstance(answer, Answer) and not answer.ok and "closed" in answer.message
    control.sleep.asleep, control.weights.change = frozenset(), None
    trained.pause()
    assert not trained.call(StartWeightUpdate).ok
    trained.init()
    trained.update(weights_of(folders[1]))
    trained.resume()
    assert generate(trained) == expected(folders[1])


@pytest.mark.parametrize("is_paused", [True, False])
def test_a_call_for_tensors_outside_an_update_keeps_the_group(folders: list[Path], is_paused: bool) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause()
    trained.init()
    for version in ("1", "2"):
        if not is_paused:
            trained.resume()
        for is_refused in (False, True):
            answer = trained.call(lambda call, bad=is_refused: UpdateWeights(call, *described(tensors), None, bad))
            assert not answer.ok and "closed" not in answer.message
        trained.pause()
        trained.update(tensors, version)


def test_tensors_that_were_not_received_in_time_close_the_group(folders: list[Path]) -> None:
    trained = TrainedEngine(folders[0])
    control = trained.driven.engine.control
    trained.pause()
    trained.init()
    trained.start()
    control.apply(CLIENT, UpdateWeights(900, *described(weights_of(folders[1]))))
    assert control.weights.cancel("steps in flight did not end")
    assert not trained.call(StartWeightUpdate).ok
    trained.init()
    trained.update(weights_of(folders[1]))


@pytest.mark.parametrize("second", ["init", "same", "other tensors", "not valid"])
def test_a_second_call_does_not_end_the_update_that_is_due(folders: list[Path], second: str) -> None:
    trained, tensors = TrainedEngine(folders[0]), weights_of(folders[1])
    trained.pause()
    trained.init()
    trained.start()
    intruder = {
        "init": InitWeightTransfer(1000, 1, 2, "127.0.0.1", 9),
        "same": UpdateWeights(1000, *described(tensors)),
        "other tensors": UpdateWeights(1000, ["x"], ["float32"], [[1]]),
        "not valid": UpdateWeights(1000, [], [], [], is_refused=True),
    }[second]
    trained.driven.mailbox.inbox.append((CLIENT, UpdateWeights(999, *described(tensors))))
    trained.driven.mailbox.inbox.append((CLIENT, intruder))
    sending = Thread(
        target=packed_broadcast,
        args=(iter(tensors.items()), trained.trainer.broadcast, trained.buffer_bytes),
        daemon=True,
    )
    sending.start()
    trained.driven.engine.tick()
    sending.join()
    answers = {event.call: event for _, event in trained.driven.mailbox.replies if isinstance(event, Answer)}
    assert answers[999].ok and not answers[1000].ok
    assert trained.finish().ok
    trained.resume()
    assert generate(trained) == expected(folders[1])


def test_a_trainer_that_sends_nothing_is_given_up(folders: list[Path]) -> None:
    trained = TrainedEngine(folders[0])
    updates = trained.driven.engine.control.updates
    assert isinstance(updates, ExternalUpdates)
    trained.pause()
    trained.init()
    trained.start()
    names, dtypes, shapes = described(weights_of(folders[1]))
    with patch.object(updates, "timeout", 0.5):
        assert not trained.call(lambda call: UpdateWeights(call, names, dtypes, shapes)).ok
    assert trained.driven.engine.control.weights.facts.state == "incomplete"
    assert not trained.finish().ok
    trained.init()
    trained.update(weights_of(folders[1]))
    trained.resume()
    assert generate(trained) == expected(folders[1])


@pytest.mark.parametrize("clear_cache", [True, False])
def test_kept_requests_go_on_under_the_new_weights(folders: list[Path], clear_cache: bool) -> None:
    trained = TrainedEngine(folders[0])
    request = trained.driven.submit(PROMPT, params())
    while len(trained.driven.mailbox.received.get((CLIENT, request), [])) < 4:
        trained.driven.engine.tick()
    trained.pause("keep", clear_cache)
    trained.init()
    trained.update(weights_of(folders[1]))
    known = len(trained.driven.tokens(request))
    trained.resume()
    trained.driven.run()
    tokens = trained.driven.tokens(request)
    assert len(tokens) == LENGTH and isinstance(trained.driven.outcome(request), Finished)
    assert tokens[:known] == expected(folders[0])[:known]
    if clear_cache:
        assert tokens[known:] == expected(folders[1], PROMPT + tokens[:known], LENGTH - known)
    assert generate(trained) == expected(folders[1]), "nothing computed under the old weights is shared"


def test_a_host_that_is_not_allowed_is_not_contacted(folders: list[Path]) -> None:
    trained = TrainedEngine(folders[0], weight_update_hosts="10.0.0.0/8")
    trained.pause()
    answer = trained.call(lambda call: InitWeightTransfer(call, 1, 2, "127.0.0.1", 9))
    assert not answer.ok and "--weight-update-hosts" in answer.message


def test_the_prefix_cache_is_emptied_on_request(folders: list[Path]) -> None:
    trained = TrainedEngine(folders[0])
    memory = trained.driven.engine.scheduler.memory
    generate(trained)
    assert memory.pages.owned()
    assert trained.call(ResetPrefixCache).ok
    assert not memory.pages.owned()
    assert generate(trained) == expected(folders[0])


@pytest.mark.parametrize(("enabled", "version"), [(True, "0"), (False, "")])
def test_a_draft_model_has_the_version_of_the_start(folders: list[Path], enabled: bool, version: str) -> None:
    options = EngineOptions(
        model=str(folders[0]), speculate=f"model:{folders[1]}", enable_weight_updates=enabled, **SIZES
    )
    facts = DrivenEngine.build(options).engine.control.model
    assert (facts.draft_model, facts.draft_weight_version) == (folders[1].name, version)


def test_an_engine_without_the_flag_takes_no_updates(folders: list[Path]) -> None:
    trained = TrainedEngine(folders[0], enable_weight_updates=False)
    trained.pause()
    answer = trained.call(StartWeightUpdate)
    assert not answer.ok and "--enable-weight-updates" in answer.message
