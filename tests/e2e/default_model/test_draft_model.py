"""The default model as its own draft model, over real processes and two frontends: the same answers, in fewer steps."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.frontend.cli.main import main
from tandem.frontend.offline.llm import LLM
from tests.e2e.default_model.test_serving import MODEL
from tests.support.serving import GUARD_SECONDS, Serving, until
from tests.support.session_calls import end, inspected

QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
DRAFTS, DRAFTED, ACCEPTED = (
    f"tandem_spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")
)
BY_POSITION = "tandem_spec_decode_num_accepted_tokens_per_pos_total"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    drafts = ("--speculate", f"model:{DEFAULT_MODEL}", "--speculate-tokens", "3")
    with Serving(tmp_path_factory.mktemp("draft_model") / "log", *drafts, "--frontends", "2") as running:
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=serving.url + "/v1", api_key="none", timeout=GUARD_SECONDS, max_retries=0) as one:
        yield one


def chat(client: openai.OpenAI, speculation: bool, **fields: Any) -> Any:
    extra = {**fields.pop("extra_body", {}), "speculation": speculation}
    given = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 48, **fields}
    return client.chat.completions.create(**given, extra_body=extra)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "temperature": 0.7, "seed": 4},
        {"temperature": 1.5, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.5},
        {"logprobs": True, "top_logprobs": 3},
        {"max_completion_tokens": 1},
        {"stop": ["the"]},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"stop_token_ids": [5, 6, 7], "min_tokens": 20}},
    ],
)
def test_answers_equal_those_without_drafts(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    plain, reply = chat(client, False, **fields), chat(client, True, **fields)
    assert [choice.message.content for choice in reply.choices] == [choice.message.content for choice in plain.choices]
    assert [choice.finish_reason for choice in reply.choices] == [choice.finish_reason for choice in plain.choices]
    assert reply.usage.completion_tokens == plain.usage.completion_tokens
    details = reply.usage.completion_tokens_details
    assert details is None or not details.accepted_prediction_tokens, "nothing was predicted"
    if fields.get("logprobs"):
        tokens = [[token.token for token in one.choices[0].logprobs.content] for one in (plain, reply)]
        values = [[token.logprob for token in one.choices[0].logprobs.content] for one in (plain, reply)]
        assert tokens[0] == tokens[1] and values[0] == pytest.approx(values[1], abs=1e-3)


def test_streams_that_run_together_equal_answers_alone(client: openai.OpenAI) -> None:
    """Some of them without drafts, in the same steps."""
    questions = [f"What does {name} do?" for name in ("math.gcd", "os.path.join", "json.dumps", "textwrap.dedent")]

    def text(question: str, speculation: bool) -> str:
        stream = chat(client, speculation, messages=[{"role": "user", "content": question}], stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    expected = [text(question, False) for question in questions]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(text, questions * 2, [True, True, True, False] * 2))
    assert found == expected * 2


def test_a_prediction_is_ignored_by_name(client: openai.OpenAI) -> None:
    """The draft model needs none."""
    plain = chat(client, False)
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=48,  # type: ignore[arg-type]
        prediction={"type": "content", "content": "It removes"},
    )  # fmt: skip
    reply = raw.parse()
    assert "prediction" in raw.headers["x-tandem-ignored"]
    assert reply.choices[0].message.content == plain.choices[0].message.content
    assert reply.usage is not None and reply.usage.completion_tokens_details is not None
    details = reply.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_the_log_the_metrics_and_inspect_agree(
    serving: Serving, client: openai.OpenAI, capsys: pytest.CaptureFixture[str]
) -> None:
    before = inspected(client)["speculation"]
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=48, n=2,  # type: ignore[arg-type]
        extra_body={"ignore_eos": True},  # Accepted drafts behind the end of an answer count for the engine alone.
    )  # fmt: skip
    after = inspected(client)["speculation"]
    logged = re.compile(rf"request_id={raw.headers['x-request-id']} .* drafted_tokens=(\d+) accepted_tokens=(\d+) ")
    line = until(lambda: logged.search(serving.log.read_text()), "the line of the request")
    drafted, accepted = int(line[1]), int(line[2])
    assert after["drafted_tokens"] - before["drafted_tokens"] == drafted
    assert after["accepted_tokens"] - before["accepted_tokens"] == accepted
    assert 0.9 * drafted < accepted <= drafted, "the same model, whose batches round differently"
    totals = {
        DRAFTED: after["drafted_tokens"],
        ACCEPTED: after["accepted_tokens"],
        BY_POSITION: after["accepted_tokens"],
    }
    until(lambda: {name: serving.engine_metric(name) for name in totals} == totals, f"metrics of {totals}")
    assert 0 < serving.engine_metric(DRAFTS) < serving.engine_metric(DRAFTED)
    assert main(["inspect", "--url", serving.url]) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("speculation "))
    found = re.fullmatch(
        r"speculation +(.*), 3 drafts a step; acceptance rate \S+% \((\d+) of (\d+) drafts; by position ([\d, ]+)\)",
        shown,
    )
    assert found is not None, shown
    assert (int(found[2]), int(found[3])) == (after["accepted_tokens"], after["drafted_tokens"])
    assert len(found[4].split(", ")) == 3


def test_turns_of_a_session_draft_on_their_cached_pages(client: openai.OpenAI) -> None:
    plain = chat(client, False)
    answer = plain.choices[0].message.content
    talk = [*QUESTION, {"role": "assistant", "content": answer}, {"role": "user", "content": "And json.dumps?"}]
    expected = chat(client, False, messages=talk, extra_body={"cache_salt": "alone"})
    session = {"session_id": "drafted", "cache_salt": "together"}
    assert chat(client, True, extra_body=session).choices[0].message.content == answer
    before = inspected(client)["speculation"]
    reply = chat(client, True, messages=talk, extra_body=session)
    after = inspected(client)["speculation"]
    assert reply.choices[0].message.content == expected.choices[0].message.content
    assert reply.usage.prompt_tokens_details.cached_tokens > 0
    accepted, drafted = (after[name] - before[name] for name in ("accepted_tokens", "drafted_tokens"))
    assert accepted > 0.9 * drafted > 0
    end(client, "drafted")


def test_an_engine_that_was_killed_drafts_again(serving: Serving, client: openai.OpenAI) -> None:
    expected, connects = chat(client, False).choices[0].message.content, serving.num_connects
    serving.engine.kill()
    until(lambda: serving.num_connects == connects + 2, "the engine after it, for both frontends")
    until(serving.ready, "readiness")
    assert chat(client, True).choices[0].message.content == expected
    found = inspected(client)["speculation"]
    assert found["accepted_tokens"] > 0.9 * found["drafted_tokens"] > 0
    until(serving.rows_and_pages_are_free, "rows and pages to come back")


def test_offline_results_count_drafts() -> None:
    with LLM(speculate=f"model:{DEFAULT_MODEL}", speculate_tokens=3, log_level="warning") as llm:
        [drafted, plain] = [
            llm.chat(QUESTION, temperature=0, max_tokens=48, speculation=wanted)[0] for wanted in (True, False)
        ]
        [scored] = llm.verify([plain.prompt_token_ids], [plain.outputs[0].token_ids])
    assert drafted.text == plain.text
    assert drafted.drafted_tokens >= drafted.accepted_tokens > 0.9 * drafted.drafted_tokens
    assert (plain.drafted_tokens, plain.accepted_tokens) == (0, 0)
    assert scored.error is None and all(
        max(found, key=lambda token: found[token].logprob) == token
        for found, token in zip(scored.logprobs, scored.token_ids, strict=True)
    )
