"""One arithmetic for prompts, chunks and decoded tokens."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine_core.scheduler.commit import check_stop
from tandem.engine_core.sequence import Sequence
from tandem.protocol.errors import FinishReason
from tandem.protocol.events import Finished
from tandem.protocol.params import SamplingParams
from tests.support.scheduling import submitted


def new(prompt: int, max_tokens: int, end_ids: frozenset[int] = frozenset(), min_tokens: int = 0) -> Sequence:
    params = SamplingParams(max_tokens, min_tokens=min_tokens)
    return submitted(1, range(10, 10 + prompt), params, end_ids, request_id=7)


@given(st.integers(1, 40), st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=8), st.integers(1, 2))
def test_any_chunking_computes_every_position_once(prompt: int, max_tokens: int, chunks: list[int], depth: int) -> None:
    """A sequence through a pipeline of any depth: positions are contiguous, and each is computed once."""
    seq = new(prompt, max_tokens)
    flights: list[bool] = []
    computed: list[int] = []
    turn = 0
    while seq.generated < max_tokens:
        if len(flights) == depth or not (len(seq.tokens) + seq.num_inflight_samples < seq.total_len and seq.pending):
            samples = flights.pop(0)
            seq.inflight -= 1
            if samples:
                seq.num_inflight_samples -= 1
                seq.tokens.append(99)
            continue
        length = min(seq.pending, chunks[turn % len(chunks)])
        samples = length == seq.pending
        flights.append(samples)
        computed += range(seq.num_scheduled_tokens, seq.num_scheduled_tokens + length)
        seq.num_scheduled_tokens += length
        seq.num_inflight_samples += samples
        seq.inflight += 1
        turn += 1
        assert seq.pending >= 0
        assert seq.generated + seq.num_inflight_samples <= max_tokens, "length caps are foreseen"
    assert computed == list(range(prompt + max_tokens - 1)), "the last token needs no KV position"
    assert not flights, "no row is computed for a sequence that is at its length"
    assert len(seq.tokens) == seq.total_len


def test_repr_shows_the_numbers_a_bug_report_needs() -> None:
    text = repr(new(3, 5))
    for part in ("3+0 tokens of 8", "num_scheduled_tokens=0", "num_inflight_samples=0", "inflight=0", "row=-1"):
        assert part in text


class TestEnd:
    def test_goes_on_before_its_length(self) -> None:
        seq = new(2, 3, frozenset({5}))
        seq.tokens.append(4)
        assert check_stop(seq) is None

    def test_an_end_id_stops_and_is_named(self) -> None:
        seq = new(2, 3, frozenset({5}))
        seq.tokens.append(5)
        assert check_stop(seq) == Finished(7, FinishReason.STOP, 5)

    def test_an_end_id_at_the_last_position_is_a_stop(self) -> None:
        seq = new(2, 1, frozenset({5}))
        seq.tokens.append(5)
        assert check_stop(seq) == Finished(7, FinishReason.STOP, 5)

    def test_the_length_ends_it(self) -> None:
        seq = new(2, 1, frozenset({5}))
        seq.tokens.append(4)
        assert check_stop(seq) == Finished(7, FinishReason.LENGTH)

    def test_min_tokens_holds_an_end_id_back(self) -> None:
        seq = new(2, 9, frozenset({5}), min_tokens=2)
        for generated, expected in ((1, None), (2, None), (3, Finished(7, FinishReason.STOP, 5))):
            seq.tokens.append(5)
            assert (seq.generated, check_stop(seq)) == (generated, expected)
