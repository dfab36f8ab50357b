"""Hypothesis strategies for every message of the wire."""

from hypothesis import strategies as st

from tandem.protocol.commands import (
    PAUSE_MODES,
    Abort,
    EndSession,
    FinishWeightUpdate,
    Goodbye,
    Hello,
    InitWeightTransfer,
    Inspect,
    Pause,
    Renew,
    ResetPrefixCache,
    Resume,
    SetPolicy,
    Sleep,
    StartWeightUpdate,
    Submit,
    UpdateWeights,
    WakeUp,
)
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import (
    SEQUENCE_STATES,
    Answer,
    Closed,
    Failure,
    Finished,
    Heartbeat,
    InspectedSequence,
    InspectedSession,
    Inspection,
    Launched,
    Limits,
    ModelFacts,
    Phase,
    Ready,
    Refused,
    Started,
    StepOutput,
    TokenLogprobs,
)
from tandem.protocol.params import SamplingParams
from tandem.protocol.stats import EngineStats, Histogram

INT32 = st.integers(-(2**31), 2**31 - 1)
UINT64 = st.integers(0, 2**64 - 1)
ANY_INT = st.integers(-(2**63), 2**64 - 1)
REAL = st.floats(allow_nan=False)
FLOAT32 = st.floats(width=32, allow_nan=False)
TEXT = st.text(max_size=20)
BLOB = st.binary(max_size=40)

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=ANY_INT,
    temperature=REAL,
    top_k=ANY_INT,
    top_p=REAL,
    min_p=REAL,
    repetition_penalty=REAL,
    presence_penalty=REAL,
    frequency_penalty=REAL,
    seed=ANY_INT,
    choice=ANY_INT,
    min_tokens=ANY_INT,
    ignore_eos=st.booleans(),
    stop_token_ids=BLOB,
    logit_bias_ids=BLOB,
    logit_bias_values=BLOB,
)
COMMANDS = (
    st.builds(Hello, protocol_version=ANY_INT, engine_epoch=ANY_INT, name=TEXT)
    | st.builds(
        Submit,
        request_id=ANY_INT,
        prompt_ids=BLOB,
        sampling=SAMPLING,
        constraint=st.none() | TEXT,
        logprobs=st.none() | ANY_INT,
        prompt_logprobs=st.none() | ANY_INT,
        priority=ANY_INT,
        session=TEXT,
        cache_salt=TEXT,
        http_request_id=TEXT,
        group=ANY_INT,
    )
    | st.builds(Abort, request_ids=st.lists(ANY_INT, max_size=5))
    | st.builds(Goodbye)
    | st.builds(EndSession, call=ANY_INT, session=TEXT)
    | st.builds(SetPolicy, call=ANY_INT, policy=TEXT)
    | st.builds(Inspect, call=ANY_INT)
    | st.builds(Renew, adapter_changes=ANY_INT)
    | st.builds(Pause, call=ANY_INT, mode=st.sampled_from(PAUSE_MODES), refuse_new=st.booleans())
    | st.builds(Resume, call=ANY_INT)
    | st.builds(ResetPrefixCache, call=ANY_INT)
    | st.builds(Sleep, call=ANY_INT, level=ANY_INT, mode=st.sampled_from(PAUSE_MODES))
    | st.builds(WakeUp, call=ANY_INT, tags=st.lists(TEXT, max_size=3))
    | st.builds(InitWeightTransfer, call=ANY_INT, rank=ANY_INT, world_size=ANY_INT, address=TEXT, port=ANY_INT)
    | st.builds(StartWeightUpdate, call=ANY_INT)
    | st.builds(
        UpdateWeights,
        call=ANY_INT,
        names=st.lists(TEXT, max_size=3),
        dtypes=st.lists(TEXT, max_size=3),
        shapes=st.lists(st.lists(ANY_INT, max_size=3), max_size=3),
        is_refused=st.booleans(),
    )
    | st.builds(FinishWeightUpdate, call=ANY_INT, version=TEXT)
)

FACTS = st.builds(
    ModelFacts,
    name=TEXT,
    vocab_size=ANY_INT,
    max_len=ANY_INT,
    end_ids=st.lists(ANY_INT, max_size=4),
    tokenizer_fingerprint=TEXT,
    device=TEXT,
    dtype=TEXT,
    created=ANY_INT,
    template_fingerprint=TEXT,
)
LIMITS = st.builds(Limits, *[ANY_INT] * 7)
FINISHED = st.builds(
    Finished, request_id=ANY_INT, reason=st.sampled_from(FinishReason), stop_token_id=st.none() | ANY_INT
)
FAILURE = st.builds(Failure, request_id=ANY_INT, code=st.sampled_from(ErrorCode), message=TEXT)
LOGPROBS = st.builds(TokenLogprobs, request_id=ANY_INT, start=ANY_INT, top=ANY_INT, lines=BLOB)
HISTOGRAM = st.builds(Histogram, bounds=st.lists(REAL, max_size=4), counts=st.lists(ANY_INT, max_size=5), total=REAL)
COUNTS = st.dictionaries(TEXT, ANY_INT, max_size=3)
STATS = st.builds(
    EngineStats,
    running=ANY_INT,
    waiting=ANY_INT,
    rows_total=ANY_INT,
    pages_used=ANY_INT,
    pages_total=ANY_INT,
    steps_in_flight=ANY_INT,
    steps_launched=ANY_INT,
    steps_committed=ANY_INT,
    oldest_wait=REAL,
    prompt_tokens=ANY_INT,
    generation_tokens=ANY_INT,
    zombie_rows=ANY_INT,
    requests_accepted=ANY_INT,
    requests_finished=COUNTS,
    requests_failed=COUNTS,
    stage_seconds=st.dictionaries(TEXT, REAL, max_size=3),
    queue_time=HISTOGRAM,
    step_rows=HISTOGRAM,
    paused=ANY_INT,
    pause_changes=ANY_INT,
)
EVENTS = (
    st.builds(Ready, protocol_version=ANY_INT, engine_epoch=ANY_INT, model=FACTS, limits=LIMITS)
    | st.builds(Refused, message=TEXT)
    | st.builds(Closed, message=TEXT)
    | st.builds(Launched, request_ids=st.lists(ANY_INT, max_size=3))
    | st.builds(
        StepOutput,
        step_id=ANY_INT,
        request_ids=BLOB,
        counts=BLOB,
        tokens=BLOB,
        finished=st.lists(FINISHED, max_size=3),
        failures=st.lists(FAILURE, max_size=3),
        logprobs=st.lists(LOGPROBS, max_size=3),
        started=st.lists(st.builds(Started, ANY_INT, ANY_INT), max_size=3),
    )
    | st.builds(
        Heartbeat,
        engine_epoch=ANY_INT,
        phase=st.sampled_from(Phase),
        percent=ANY_INT,
        detail=TEXT,
        pending=ANY_INT,
        stats=STATS,
    )
    | st.builds(Answer, call=ANY_INT, ok=st.booleans(), message=TEXT, pause_changes=ANY_INT)
    | st.builds(
        Inspection,
        call=ANY_INT,
        policy=TEXT,
        stats=STATS,
        pages_free=ANY_INT,
        pages_settling=ANY_INT,
        sequences=st.lists(
            st.builds(
                InspectedSequence,
                TEXT,
                ANY_INT,
                st.sampled_from(SEQUENCE_STATES),
                *[ANY_INT] * 9,
                REAL,
                TEXT,
                REAL,
                TEXT,
            ),
            max_size=2,
        ),
        sessions=st.lists(st.builds(InspectedSession, TEXT, st.booleans(), ANY_INT, REAL), max_size=2),
        omitted=ANY_INT,
        pause_mode=st.none() | st.sampled_from(PAUSE_MODES),
        refuses_new=st.booleans(),
    )
)
