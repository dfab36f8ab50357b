"""Drafts from the text and from predictions, over real processes: the same answers, and counts of the drafts."""

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tandem.frontend.cli.main import main
from tandem.frontend.offline.llm import LLM
from tests.e2e.default_model.test_serving import MODEL
from tests.support.serving import ABORTS, GUARD_SECONDS, Serving, until
from tests.support.session_calls import end, inspected

QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
COPY = "import os\nimport sys\n" * 4
"""Text after which the model, where nothing ends it, repeats its end."""
DRAFTED = "tandem_spec_decode_num_draft_tokens_total"
ACCEPTED = "tandem_spec_decode_num_accepted_tokens_total"
BY_POSITION = "tandem_spec_decode_num_accepted_tokens_per_pos_total"


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    config = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'
    with Serving(tmp_path_factory.mktemp("drafting") / "log", "--speculative-config", config) as running:
        yield running


@pytest.fixture
def drafting_client(drafting: Serving) -> Iterator[openai.OpenAI]:
    url = drafting.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=GUARD_SECONDS, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, prediction: str | None = None, **fields: Any) -> Any:
    """Ask the question; without a prediction no drafts are verified."""
    if prediction is None:
        fields["extra_body"] = {**fields.pop("extra_body", {}), "speculation": False}
    else:
        fields["prediction"] = {"type": "content", "content": prediction}
    given = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 64, **fields}
    return client.chat.completions.create(**given)


def counts(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


@pytest.fixture(scope="module")
def answer(drafting: Serving) -> str:
    """The answer without drafts."""
    with openai.OpenAI(base_url=drafting.url + "/v1", api_key="none", timeout=GUARD_SECONDS) as client:
        text: str = chat(client).choices[0].message.content
    assert len(text) > 40
    return text


def test_a_prediction_of_the_answer_changes_nothing_but_the_number_of_steps(
    drafting_client: openai.OpenAI, answer: str
) -> None:
    reply = chat(drafting_client, answer)
    accepted, rejected = counts(reply.usage)
    assert reply.choices[0].message.content == answer
    assert 10 < accepted < reply.usage.completion_tokens and rejected <= 10


def test_a_wrong_prediction_changes_nothing_either(drafting_client: openai.OpenAI, answer: str) -> None:
    reply = chat(drafting_client, answer[:30] + " completely different words" + answer[30:])
    assert reply.choices[0].message.content == answer
    accepted, rejected = counts(reply.usage)
    assert accepted > 0 and rejected > 0


def test_streams_report_predictions_in_their_usage(drafting_client: openai.OpenAI, answer: str) -> None:
    parts = [{"type": "text", "text": answer[:20]}, {"type": "text", "text": answer[20:]}]
    stream = drafting_client.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True},
        prediction={"type": "content", "content": parts},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    assert counts(chunks[-1].usage)[0] > 10


def test_a_stop_string_ends_an_accepted_run(drafting_client: openai.OpenAI, answer: str) -> None:
    """And its tokens before are counted, though the engine has not reported the end."""
    stop = answer[30:36]
    plain = chat(drafting_client, stop=[stop])
    reply = chat(drafting_client, answer, stop=[stop])
    assert reply.choices[0].message.content == plain.choices[0].message.content == answer[: answer.index(stop)]
    assert reply.usage.completion_tokens == plain.usage.completion_tokens
    assert 0 < counts(reply.usage)[0] <= reply.usage.completion_tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3, "temperature": 0.7, "seed": 4},
        {"temperature": 1.5, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.5},
        {"logprobs": True, "top_logprobs": 3},
        {"max_completion_tokens": 3},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"stop_token_ids": [5, 6, 7], "min_tokens": 20}},
    ],
)
def test_answers_equal_those_without_drafts(
    drafting_client: openai.OpenAI, answer: str, fields: dict[str, Any]
) -> None:
    plain, reply = chat(drafting_client, **fields), chat(drafting_client, answer, **fields)
    assert [choice.message.content for choice in reply.choices] == [choice.message.content for choice in plain.choices]
    assert [choice.finish_reason for choice in reply.choices] == [choice.finish_reason for choice in plain.choices]
    assert reply.usage.completion_tokens == plain.usage.completion_tokens
    if fields.get("logprobs"):
        tokens = [[token.token for token in one.choices[0].logprobs.content] for one in (plain, reply)]
        values = [[token.logprob for token in one.choices[0].logprobs.content] for one in (plain, reply)]
        assert tokens[0] == tokens[1] and values[0] == pytest.approx(values[1], abs=1e-3)


def test_turns_of_a_session_take_predictions(drafting_client: openai.OpenAI, answer: str) -> None:
    turn = {"role": "user", "content": "Explain json.dumps."}
    talk = [*QUESTION, {"role": "assistant", "content": answer}, turn]
    plain = chat(drafting_client, messages=talk, extra_body={"cache_salt": "alone"})
    expected = plain.choices[0].message.content
    session = {"session_id": "predicted", "cache_salt": "together"}
    assert chat(drafting_client, answer, extra_body=session).choices[0].message.content == answer
    reply = chat(drafting_client, expected, messages=talk, extra_body=session)
    assert reply.choices[0].message.content == expected
    assert reply.usage.prompt_tokens_details.cached_tokens > 0 and counts(reply.usage)[0] > 0
    end(drafting_client, "predicted")


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": COPY, "max_tokens": 24, "ignore_eos": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": COPY}], "max_tokens": 24, "ignore_eos": True},
    "/v1/responses": {"input": COPY, "max_output_tokens": 24, "ignore_eos": True, "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": COPY}], "max_tokens": 24, "ignore_eos": True},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_route_takes_a_request_out(drafting: Serving, path: str) -> None:
    body = {"model": MODEL, "temperature": 0, **BODIES[path]}

    def lines() -> list[str]:
        return re.findall(rf": POST {path} 200 .*", drafting.log.read_text())

    for speculation in (False, True, None):
        known = len(lines())
        assert drafting.post(path, {**body, "speculation": speculation})[0] == 200
        until(lambda known=known: len(lines()) > known, "the line of the request")
        assert (" drafted_tokens=" in lines()[-1]) == (speculation is not False)
    status, error = drafting.post(path, {**body, "speculation": "no"})
    assert status == 400 and error["error"].get("param", "speculation") == "speculation"


def test_the_log_the_metrics_and_the_usage_agree(
    drafting: Serving, drafting_client: openai.OpenAI, answer: str
) -> None:
    before = inspected(drafting_client)["speculation"]
    raw = drafting_client.chat.completions.with_raw_response.create(
        model=MODEL, messages=QUESTION, temperature=0, n=2,  # type: ignore[arg-type]
        prediction={"type": "content", "content": answer},
    )  # fmt: skip
    after = inspected(drafting_client)["speculation"]
    logged = re.compile(rf"request_id={raw.headers['x-request-id']} .* drafted_tokens=(\d+) accepted_tokens=(\d+) ")
    line = until(lambda: logged.search(drafting.log.read_text()), "the line of the request")
    for name, count in (("drafted_tokens", int(line[1])), ("accepted_tokens", int(line[2]))):
        assert after[name] - before[name] == count
    usage = raw.parse().usage
    assert usage is not None and 0 < counts(usage)[0] <= int(line[2])
    names = {
        DRAFTED: after["drafted_tokens"],
        ACCEPTED: after["accepted_tokens"],
        BY_POSITION: after["accepted_tokens"],
    }
    until(lambda: {name: drafting.engine_metric(name) for name in names} == names, f"metrics of {names}")


def test_a_client_that_leaves_ends_its_request(drafting: Serving, drafting_client: openai.OpenAI, answer: str) -> None:
    aborted = drafting.fresh_engine_metric(ABORTS)
    endless = {"stream": True, "max_completion_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with chat(drafting_client, answer, **endless) as stream:
        next(iter(stream))
    until(lambda: drafting.fresh_engine_metric(ABORTS) > aborted, "the abort")
    until(drafting.rows_and_pages_are_free, "rows and pages to come back")


def test_inspect_shows_the_drafts(
    drafting: Serving, drafting_client: openai.OpenAI, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(drafting_client, answer)
    assert main(["inspect", "--url", drafting.url]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("speculation "))
    found = re.fullmatch(
        r"speculation +ngram, 5 drafts a step; acceptance rate \S+% \((\d+) of (\d+) drafts; by position ([\d, ]+)\)",
        line,
    )
    assert found is not None, line
    positions = [int(count) for count in found[3].split(", ")]
    assert len(positions) == 5 and sum(positions) == int(found[1]) <= int(found[2])
    assert positions == sorted(positions, reverse=True), "drafts are right up to the first wrong one"


def test_offline_results_count_drafts(answer: str) -> None:
    prediction = {"type": "content", "content": answer}
    with LLM(speculate="ngram", speculate_tokens=5, log_level="warning") as llm:
        [result] = llm.chat(QUESTION, temperature=0, max_tokens=64, prediction=prediction)
        [copied, plain] = [
            llm.generate(COPY, temperature=0, max_tokens=64, ignore_eos=True, speculation=wanted)[0]
            for wanted in (True, False)
        ]
    assert result.text == answer
    details = result.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens <= result.accepted_tokens <= result.drafted_tokens  # type: ignore[union-attr]
    assert copied.text == plain.text
    assert copied.drafted_tokens >= copied.accepted_tokens > 0
    assert (plain.drafted_tokens, plain.accepted_tokens) == (0, 0)
