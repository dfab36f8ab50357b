"""Commands: each rule with its error code and numbers, and hostile commands without effect."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tandem.engine_core.control import Control
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.stats import new_stats
from tandem.protocol.codec import pack_floats, pack_ids, unpack_ids
from tandem.protocol.commands import Abort, AnyCommand, EndSession, Goodbye, Hello, Inspect, SetPolicy, Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Answer, Failure, Finished, Inspection, Limits, ModelFacts, Ready, Refused
from tandem.protocol.params import MAX_LOGIT_BIAS, MAX_SEED, MAX_STOP_TOKEN_IDS, SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.fakes.constraint import FakeCompiler
from tests.support.kv_pool import kv_memory
from tests.support.messages import COMMANDS
from tests.support.refusals import numbers_in

EPOCH, VOCAB, MAX_LEN, END = 77, 100, 48, 1
FACTS = ModelFacts("fake", VOCAB, MAX_LEN, [END, 2], "", "cpu", "float32", 0)
LIMITS = Limits(4, 80, 4, 16, 3)
PROMPT = pack_ids([5, 6, 7])


def new(pages: int = 21, max_waiting: int = 3) -> Control:
    limits = SchedulerLimits(16, 16, max_waiting)
    scheduler = Scheduler(RowGate(4), kv_memory(pages), limits)
    return Control(scheduler, FakeCompiler(), EPOCH, FACTS, LIMITS, new_stats(), FakeClock())


def greeted(*clients: bytes, **sizes: int) -> Control:
    control = new(**sizes)
    for client in clients or (b"a",):
        assert isinstance(control.apply(client, Hello(PROTOCOL_VERSION, EPOCH, "test")), Ready)
    return control


def submit(prompt: bytes = PROMPT, request_id: int = 9, **params: Any) -> Submit:
    return Submit(request_id, prompt, SamplingParams(params.pop("max_tokens", 4), **params))


def wants(**fields: Any) -> Submit:
    return structs.replace(submit(), **fields)


def test_compiler_learns_how_slow_the_frontend_found_a_grammar() -> None:
    (control := greeted()).apply(b"a", wants(constraint="runs 2", constraint_seconds=0.25))
    assert isinstance(control.compiler, FakeCompiler) and control.compiler.seconds == [0.25]


class TestHello:
    def test_hello_is_answered_with_the_models_facts(self) -> None:
        assert new().apply(b"a", Hello(PROTOCOL_VERSION, EPOCH, "x")) == Ready(PROTOCOL_VERSION, EPOCH, FACTS, LIMITS)

    @pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, -1, 2**63])
    def test_hello_of_another_version_is_refused_with_both_versions(self, version: int) -> None:
        control = new()
        answer = control.apply(b"a", Hello(version, EPOCH, "front"))
        assert isinstance(answer, Refused)
        older = "frontend" if version < PROTOCOL_VERSION else "engine"
        for part in (
            "front",
            f"protocol {version}",
            f"engine {PROTOCOL_VERSION};",
            f"upgrade tandem-llm on the host of the {older}",
        ):
            assert part in answer.message
        assert control.apply(b"a", submit()) is None
        assert control.scheduler.num_open == 0

    def test_hello_for_another_engine_is_ignored(self) -> None:
        control = new()
        assert control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH + 1, "x")) is None
        assert not control.clients

    def test_commands_before_hello_are_ignored(self) -> None:
        control = greeted(b"a")
        for command in (submit(), Abort([9]), Goodbye()):
            assert control.apply(b"b", command) is None
        assert control.scheduler.num_open == 0
        assert control.stats.requests_accepted == 0

    def test_second_hello_is_answered_and_keeps_open_requests(self) -> None:
        control = greeted()
        control.apply(b"a", submit())
        assert isinstance(control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH, "x")), Ready)
        assert control.scheduler.is_open(b"a", 9)


class TestScheduling:
    def test_submit_sets_priority_session_and_namespace(self) -> None:
        control = greeted()
        asked = Submit(9, PROMPT, SamplingParams(4), priority=3, session="talk", cache_salt="pepper")
        assert control.apply(b"a", asked) is None
        (seq,) = control.scheduler.waiting
        assert (seq.priority, seq.submit.session, seq.cache.namespace) == (3, "talk", b"pepper")

    def test_an_inspection_and_the_log_name_the_http_request(self) -> None:
        control = greeted()
        control.apply(b"a", structs.replace(submit(), http_request_id="req_7"))
        (seq,) = control.scheduler.waiting
        assert "request 'req_7'" in repr(seq)
        seen = control.apply(b"a", Inspect(1))
        assert isinstance(seen, Inspection) and seen.sequences[0].http_request_id == "req_7"

    @pytest.mark.parametrize(
        ("field", "value", "name", "numbers"),
        [
            ("priority", 101, "priority", [101, -100, 100]),
            ("priority", -101, "priority", [-101, -100, 100]),
            ("session", "é" * 129, "session_id", [258, 256]),
            ("cache_salt", "x" * 257, "cache_salt", [257, 256]),
            ("http_request_id", "x" * 257, "http_request_id", [257, 256]),
        ],
    )
    def test_scheduling_fields_out_of_range_are_rejected(
        self, field: str, value: Any, name: str, numbers: list[int]
    ) -> None:
        control = greeted()
        refusal = control.apply(b"a", structs.replace(submit(), **{field: value}))
        assert isinstance(refusal, Failure)
        assert refusal.code is ErrorCode.INVALID_VALUE
        assert name in refusal.message and numbers_in(refusal.message) == numbers
        assert control.scheduler.num_open == 0

    def test_busy_session_is_rejected(self) -> None:
        control = greeted(b"a", b"b")
        assert control.apply(b"a", structs.replace(submit(), session="talk")) is None
        refusal = control.apply(b"b", structs.replace(submit(), session="talk"))
        assert isinstance(refusal, Failure)
        assert refusal.code is ErrorCode.SESSION_BUSY
        assert control.stats.requests_failed == {"session_busy": 1}

    def test_end_session_answers_whether_it_existed(self) -> None:
        control = greeted()
        unknown = control.apply(b"a", EndSession(5, "talk"))
        assert isinstance(unknown, Answer) and not unknown.ok and "'talk'" in unknown.message
        control.apply(b"a", structs.replace(submit(), session="talk"))
        assert control.apply(b"a", EndSession(6, "talk")) == Answer(6, True)
        control.apply(b"a", Abort([9]))
        assert control.apply(b"a", EndSession(7, "talk")) == structs.replace(unknown, call=7)
        assert control.apply(b"a", EndSession(7, "talk")) == structs.replace(unknown, call=7)

    def test_set_policy_changes_the_policy(self) -> None:
        control = greeted()
        assert control.apply(b"a", SetPolicy(1, "priority")) == Answer(1, True)
        assert control.scheduler.policy == "priority"
        answer = control.apply(b"a", SetPolicy(2, "magic"))
        assert isinstance(answer, Answer)
        assert not answer.ok and "'magic'" in answer.message
        assert "fcfs, prefill_first, decode_first, decode_round_robin, priority" in answer.message
        assert control.scheduler.policy == "priority"

    def test_static_batching_rejects_other_policies(self) -> None:
        control = greeted()
        control.scheduler.limits = SchedulerLimits(16, 0, 3, static=True)
        answer = control.apply(b"a", SetPolicy(1, "decode_first"))
        assert isinstance(answer, Answer)
        assert "decode_first" in answer.message and "--batching continuous" in answer.message
        assert control.apply(b"a", SetPolicy(2, "fcfs")) == Answer(2, True)

    def test_inspect_is_answered_with_a_snapshot(self) -> None:
        control = greeted()
        control.apply(b"a", submit())
        seen = control.apply(b"a", Inspect(4))
        assert isinstance(seen, Inspection)
        assert (seen.call, [sequence.request_id for sequence in seen.sequences]) == (4, [9])
        assert seen.stats is control.stats


class TestSubmit:
    def test_submit_makes_a_sequence(self) -> None:
        control = greeted()
        control.clock.advance(5)  # type: ignore[attr-defined]
        assert control.apply(b"a", submit(stop_token_ids=pack_ids([8]))) is None
        (seq,) = control.scheduler.waiting
        assert list(seq.tokens) == [5, 6, 7]
        assert (seq.client, seq.request_id, seq.submit.sampling.max_tokens, seq.arrival) == (b"a", 9, 4, 1005.0)
        assert seq.end_ids == {8, END, 2}
        assert control.stats.requests_accepted == 1

    @pytest.mark.parametrize(("most", "kept"), [(0, []), (2, [5, 6]), (3, [5, 6, 7]), (9, [5, 6, 7])])
    def test_a_prediction_is_kept_as_far_as_drafts_are_taken_from_it(self, most: int, kept: list[int]) -> None:
        control = greeted()
        control.limits = structs.replace(LIMITS, max_prediction=most)
        assert control.apply(b"a", wants(prediction=pack_ids([5, 6, 7]))) is None
        (seq,) = control.scheduler.waiting
        assert unpack_ids(seq.submit.prediction) == kept

    @pytest.mark.parametrize(
        ("prediction", "code"),
        [
            (b"abc", ErrorCode.INVALID_REQUEST),
            (pack_ids([5, VOCAB]), ErrorCode.INVALID_VALUE),
            (pack_ids([-1, 5]), ErrorCode.INVALID_VALUE),
        ],
    )
    def test_a_prediction_that_the_device_cannot_read_is_refused(self, prediction: bytes, code: ErrorCode) -> None:
        control = greeted()
        control.limits = structs.replace(LIMITS, max_prediction=4)
        refusal = control.apply(b"a", wants(prediction=prediction))
        assert isinstance(refusal, Failure) and refusal.code is code and "prediction" in refusal.message
        assert control.scheduler.num_open == 0

    def test_ignore_eos_keeps_the_requests_stop_ids(self) -> None:
        control = greeted()
        control.apply(b"a", submit(stop_token_ids=pack_ids([8]), ignore_eos=True))
        assert next(iter(control.scheduler.waiting)).end_ids == {8}

    def test_open_request_id_is_not_reused(self) -> None:
        control = greeted()
        assert control.apply(b"a", submit()) is None
        assert control.apply(b"a", submit(pack_ids([1]))) is None
        assert control.scheduler.num_open == control.stats.requests_accepted == 1
        assert list(next(iter(control.scheduler.waiting)).tokens) == [5, 6, 7]

    def test_same_id_from_two_frontends_is_two_requests(self) -> None:
        control = greeted(b"a", b"b")
        control.apply(b"a", submit())
        control.apply(b"b", submit())
        assert control.scheduler.num_open == 2

    def test_largest_request_that_fits_is_accepted(self) -> None:
        control = greeted()
        assert control.apply(b"a", submit(pack_ids([0, VOCAB - 1]), max_tokens=MAX_LEN - 2)) is None

    def test_sequence_ids_are_unique(self) -> None:
        control = greeted()
        for request_id in range(3):
            control.apply(b"a", submit(request_id=request_id))
        assert len({seq.id for seq in control.scheduler.waiting}) == 3


INVALID = ErrorCode.INVALID_VALUE
NAN, INF = math.nan, math.inf
REFUSED: list[tuple[Submit, ErrorCode, str]] = [
    (submit(b""), INVALID, "prompt is empty"),
    (submit(b"\1\0\0\0\2"), ErrorCode.INVALID_REQUEST, "5 bytes"),
    (submit(pack_ids([5, VOCAB])), INVALID, "token id 100, the vocabulary has 0 to 99"),
    (submit(pack_ids([5, -1])), INVALID, "token id -1"),
    (submit(pack_ids([2**31 - 1])), INVALID, "token id 2147483647"),
    (submit(pack_ids([-(2**31)])), INVALID, "token id -2147483648"),
    (submit(stop_token_ids=b"\1"), ErrorCode.INVALID_REQUEST, "1 bytes"),
    (submit(stop_token_ids=pack_ids([VOCAB])), INVALID, "stop_token_ids holds token id 100"),
    (submit(stop_token_ids=pack_ids([-1])), INVALID, "stop_token_ids holds token id -1"),
    (submit(stop_token_ids=pack_ids([3] * (MAX_STOP_TOKEN_IDS + 1))), INVALID, "65 stop_token_ids, at most 64"),
    (submit(logit_bias_ids=b"\1\2\3"), ErrorCode.INVALID_REQUEST, "3 bytes"),
    (submit(logit_bias_values=b"\1\2"), ErrorCode.INVALID_REQUEST, "2 bytes"),
    (
        submit(logit_bias_ids=pack_ids([VOCAB]), logit_bias_values=pack_floats([1])),
        INVALID,
        "logit_bias holds token id 100",
    ),
    (
        submit(logit_bias_ids=pack_ids([3, 4]), logit_bias_values=pack_floats([1])),
        INVALID,
        "2 logit_bias ids but 1 values",
    ),
    (
        submit(logit_bias_ids=pack_ids([3] * 513), logit_bias_values=pack_floats([1] * 513)),
        INVALID,
        f"513 logit_bias entries, at most {MAX_LOGIT_BIAS}",
    ),
    *[
        (submit(logit_bias_ids=pack_ids([3]), logit_bias_values=pack_floats([bad])), INVALID, "not finite")
        for bad in (NAN, INF, -INF)
    ],
    (submit(max_tokens=0), INVALID, "max_tokens is 0, at least 1"),
    (submit(max_tokens=-(2**63)), INVALID, "max_tokens is -9223372036854775808"),
    (submit(min_tokens=-1), INVALID, "min_tokens is -1"),
    (submit(min_tokens=5), INVALID, "min_tokens is 5, 0 to max_tokens"),
    *[(submit(temperature=bad), INVALID, f"temperature is {bad}") for bad in (-0.1, 100.5, NAN, INF, -INF)],
    *[(submit(top_k=bad), INVALID, f"top_k is {bad}") for bad in (-1, 2**31, 2**64 - 1)],
    *[(submit(top_p=bad), INVALID, f"top_p is {bad}") for bad in (0.0, -0.5, 1.01, NAN, INF)],
    *[(submit(min_p=bad), INVALID, f"min_p is {bad}") for bad in (-0.01, 1.01, NAN, INF, -INF)],
    *[
        (submit(repetition_penalty=bad), INVALID, f"repetition_penalty is {bad}")
        for bad in (0.0, -1.0, 101.0, NAN, INF)
    ],
    *[(submit(presence_penalty=bad), INVALID, f"presence_penalty is {bad}") for bad in (-101.0, 101.0, NAN, INF, -INF)],
    *[(submit(frequency_penalty=bad), INVALID, f"frequency_penalty is {bad}") for bad in (-101.0, 101.0, NAN, INF)],
    *[(submit(seed=bad), INVALID, f"seed is {bad}") for bad in (-1, MAX_SEED + 1, 2**64 - 1)],
    *[(submit(choice=bad), INVALID, f"choice is {bad}") for bad in (-1, 2**31)],
    *[(wants(logprobs=bad), INVALID, f"logprobs is {bad}, 0 to 20") for bad in (-1, 21, 2**63)],
    *[(wants(prompt_logprobs=bad), INVALID, f"prompt_logprobs is {bad}, 0 to 20") for bad in (-1, 21)],
    *[
        (wants(prompt_logprobs=0, num_verified=bad), INVALID, f"num_verified is {bad}, 1 to 2")
        for bad in (-1, 3, 2**40)
    ],
    (wants(prompt_logprobs=0, logits=True), INVALID, "num_verified is 0, 1 to 2"),
    (wants(num_verified=2), INVALID, "verified tokens need prompt_logprobs"),
    (submit(max_tokens=MAX_LEN - 2), ErrorCode.CONTEXT_LENGTH, "3 prompt tokens and max_tokens 46 make 49"),
    (submit(max_tokens=2**63), ErrorCode.CONTEXT_LENGTH, "the model's context holds 48"),
    (submit(bytes(2**20)), ErrorCode.CONTEXT_LENGTH, "262144 prompt tokens"),
    (submit(logit_bias_values=bytes(2**20)), INVALID, "262144 logit_bias values, at most 512"),
    (wants(constraint="x" * (2**20 + 1)), INVALID, "a grammar of 1048577 characters, at most 1048576"),
]


@pytest.mark.parametrize(("command", "code", "text"), REFUSED, ids=[f"{i}-{row[2]}" for i, row in enumerate(REFUSED)])
def test_invalid_submit_is_rejected_with_code_and_numbers(command: Submit, code: ErrorCode, text: str) -> None:
    control = greeted()
    answer = control.apply(b"a", command)
    assert isinstance(answer, Failure)
    assert (answer.request_id, answer.code) == (9, code)
    assert text in answer.message
    assert control.scheduler.num_open == control.stats.requests_accepted == 0
    assert control.stats.requests_failed == {code: 1}
    assert control.apply(b"a", submit()) is None, "a refused id is free again"
    assert control.scheduler.num_open == 1


def test_request_larger_than_the_pool_is_rejected() -> None:
    answer = greeted(pages=3).apply(b"a", submit(max_tokens=10))
    assert isinstance(answer, Failure)
    assert answer.code is ErrorCode.KV_CAPACITY
    assert numbers_in(answer.message)[:5] == [3, 10, 3, 4, 2]


def test_full_queue_is_overloaded() -> None:
    control = greeted(max_waiting=2)
    room = 2 + control.scheduler.rows.free
    answers = [control.apply(b"a", submit(request_id=number)) for number in range(room + 1)]
    assert answers[:room] == [None] * room, "free rows are places too: they are taken in the same tick"
    assert isinstance(answers[room], Failure)
    assert (answers[room].request_id, answers[room].code) == (room, ErrorCode.OVERLOADED)
    assert numbers_in(answers[room].message)[:1] == [room]


@pytest.mark.parametrize("request_id", [-1, -(2**63)])
def test_request_id_beyond_uint64_is_ignored(request_id: int) -> None:
    """Request ids go back in a column of uint64: one outside it would fail the send, fatal for every request."""
    control = greeted()
    control.apply(b"a", submit(request_id=request_id))
    assert control.scheduler.num_open == 0


class TestLeaving:
    def test_abort_is_idempotent_and_ignores_unknown_ids(self) -> None:
        control = greeted(b"a", b"b")
        control.apply(b"a", submit())
        control.apply(b"b", Abort([9, 10]))
        assert control.scheduler.num_open == 1, "requests of another frontend are not its own"
        for _ in range(2):
            assert control.apply(b"a", Abort([9, 9, 10, -5, 2**64 - 1])) is None
        (seq,) = control.scheduler.take_updates().ended
        assert seq.outcome == Finished(9, FinishReason.ABORT)

    def test_goodbye_ends_only_its_own_requests(self) -> None:
        control = greeted(b"a", b"b")
        for client in (b"a", b"b"):
            control.apply(client, submit())
        assert control.apply(b"a", Goodbye()) is None
        assert [seq.client for seq in control.scheduler.take_updates().ended] == [b"a"]
        assert set(control.clients) == {b"b"}
        assert control.apply(b"a", submit(request_id=10)) is None
        assert control.scheduler.num_open == 1, "after a Goodbye comes a Hello, or nothing"

    @pytest.mark.parametrize(
        "leave", [lambda control: control.apply(b"a", Goodbye()), lambda control: control.forget(b"a")]
    )
    def test_frontends_that_come_and_go_leave_nothing_behind(self, leave: Callable[[Control], object]) -> None:
        """Each connection of a frontend has an identity of its own: what is kept of it would be kept for ever."""
        control = greeted()
        leave(control)
        assert not control.clients
        kept = [name for name, value in vars(control).items() if isinstance(value, dict | set | list) and value]
        assert kept == []

    def test_forgetting_an_unknown_frontend_changes_nothing(self) -> None:
        control = greeted()
        control.forget(b"nobody")
        assert set(control.clients) == {b"a"}


@settings(deadline=None, max_examples=150, print_blob=True)
@given(st.lists(COMMANDS, max_size=6))
def test_no_command_raises(commands: list[AnyCommand]) -> None:
    control = greeted()
    for command in commands:
        answer = control.apply(b"a", command)
        assert answer is None or isinstance(answer, Ready | Refused | Failure | Answer | Inspection)
        if b"a" not in control.clients:
            control.apply(b"a", Hello(PROTOCOL_VERSION, EPOCH, "test"))
    for seq in control.scheduler.waiting:
        assert all(0 <= token < VOCAB for token in seq.tokens)
        assert seq.total_len <= MAX_LEN


REASONABLE = st.builds(
    SamplingParams,
    max_tokens=st.integers(-1, 50),
    temperature=st.floats(-1, 101) | st.just(NAN),
    top_k=st.integers(-1, 5),
    top_p=st.floats(-0.1, 1.1),
    min_tokens=st.integers(-1, 8),
    stop_token_ids=st.lists(st.integers(-1, VOCAB), max_size=3).map(pack_ids),
)


@settings(deadline=None, print_blob=True)
@given(REASONABLE, st.lists(st.integers(-1, VOCAB), max_size=50))
def test_accepted_submit_satisfies_every_rule(params: SamplingParams, prompt: list[int]) -> None:
    control = greeted()
    answer = control.apply(b"a", Submit(1, pack_ids(prompt), params))
    if answer is None:
        (seq,) = control.scheduler.waiting
        assert list(seq.tokens) == prompt
        assert prompt
        assert min(prompt) >= 0
        assert max(prompt) < VOCAB
        assert 1 <= len(prompt) + params.max_tokens <= MAX_LEN
        assert 0 <= params.temperature <= 100
        assert 0 < params.top_p <= 1
        assert 0 <= params.min_tokens <= params.max_tokens
        assert seq.end_ids <= set(range(VOCAB))
    else:
        assert isinstance(answer, Failure)
        assert not control.scheduler.waiting
