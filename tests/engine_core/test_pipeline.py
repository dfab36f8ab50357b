"""Every sequence of moves, legal and illegal, against a model of four lines."""

from collections import deque
from itertools import product

import pytest

from tandem.engine_core.pipeline import PipelineState, Step, StepState
from tandem.engine_core.plan import StepPlan

MOVES = ("launch", "sample", "begin", "finish")


class Model:
    """The rules written down a second time: steps in flight, the unsampled one, the committing one."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.queue: deque[int] = deque()
        self.unsampled: int | None = None
        self.committing: int | None = None

    def legal(self, move: str) -> bool:
        held = len(self.queue) + (self.committing is not None)
        return {
            "launch": held < self.depth and self.unsampled is None,
            "sample": self.unsampled is not None,
            "begin": bool(self.queue) and self.committing is None and self.queue[0] != self.unsampled,
            "finish": self.committing is not None,
        }[move]

    def play(self, move: str, step_id: int) -> None:
        if move == "launch":
            self.queue.append(step_id)
            self.unsampled = step_id
        elif move == "sample":
            self.unsampled = None
        elif move == "begin":
            self.committing = self.queue.popleft()
        else:
            self.committing = None


def play(pipeline: PipelineState, move: str, step_id: int) -> None:
    """Make a move with the step that it concerns, or with an unknown one if there is none."""
    stranger = Step(StepPlan.of(999, ()), 0, StepState.LAUNCHED)
    steps = pipeline.steps
    if move == "launch":
        pipeline.launch(StepPlan.of(step_id, ()))
    elif move == "sample":
        pipeline.mark_sampled(pipeline.unsampled() or (steps[-1] if steps else stranger))
    elif move == "begin":
        pipeline.begin_commit()
    else:
        committing = [step for step in steps if step.state is StepState.COMMITTING]
        pipeline.finish_commit(committing[0] if committing else (steps[0] if steps else stranger))


@pytest.mark.parametrize("depth", [1, 2])
def test_every_sequence_of_seven_moves_keeps_the_invariants(depth: int) -> None:
    legal_moves = illegal_moves = 0
    for moves in product(MOVES, repeat=7):
        pipeline, model = PipelineState(depth), Model(depth)
        for step_id, move in enumerate(moves):
            legal = model.legal(move)
            # Sequences come in the order of MOVES: of those that begin alike, the first goes on with nothing but the
            # first move. In the others what they have in common is only played again.
            if any(later != MOVES[0] for later in moves[step_id + 1 :]):
                if legal:
                    model.play(move, step_id)
                    play(pipeline, move, step_id)
                continue
            before = repr(pipeline)
            if legal:
                model.play(move, step_id)
                play(pipeline, move, step_id)
                legal_moves += 1
            else:
                with pytest.raises(AssertionError) as caught:
                    play(pipeline, move, step_id)
                assert before in str(caught.value), "an illegal move prints the state"
                assert repr(pipeline) == before, "an illegal move changes nothing"
                illegal_moves += 1
            check(pipeline, model)
    assert legal_moves + illegal_moves == sum(len(MOVES) ** length for length in range(1, 8))
    assert legal_moves > 2_000
    assert illegal_moves > 2_000


def check(pipeline: PipelineState, model: Model) -> None:
    committing = [] if model.committing is None else [model.committing]
    assert [step.plan.step_id for step in pipeline.steps] == committing + list(model.queue)
    slots = [step.slot for step in pipeline.steps]
    assert len(set(slots)) == len(slots)
    assert pipeline.in_flight == len(model.queue)
    assert pipeline.full == (len(slots) == model.depth)
    assert (pipeline.free_slot() is None) == pipeline.full
    assert pipeline.free_slot() not in slots
    unsampled = pipeline.unsampled()
    assert (unsampled.plan.step_id if unsampled else None) == model.unsampled


def test_slots_alternate_and_are_free_only_after_commit() -> None:
    pipeline = PipelineState()
    first = pipeline.mark_sampled(pipeline.launch(StepPlan.of(1, ())))
    second = pipeline.mark_sampled(pipeline.launch(StepPlan.of(2, ())))
    assert {first.slot, second.slot} == {0, 1}
    committing = pipeline.begin_commit()
    assert committing.slot == first.slot
    assert pipeline.free_slot() is None, "its pinned buffers are still read"
    pipeline.finish_commit(committing)
    assert pipeline.free_slot() == first.slot


def test_step_ids_must_increase() -> None:
    pipeline = PipelineState()
    pipeline.mark_sampled(pipeline.launch(StepPlan.of(5, ())))
    with pytest.raises(AssertionError, match="out of order"):
        pipeline.launch(StepPlan.of(5, ()))


def test_abandoned_pipeline_takes_no_step() -> None:
    pipeline = PipelineState()
    pipeline.launch(StepPlan.of(1, ()))
    pipeline.abandon()
    assert pipeline.steps == ()
    with pytest.raises(AssertionError):
        pipeline.launch(StepPlan.of(2, ()))


@pytest.mark.parametrize("depth", [0, 3])
def test_depth_must_be_one_or_two(depth: int) -> None:
    with pytest.raises(AssertionError):
        PipelineState(depth)
