"""The default model through the official client, over real processes, sockets and pages."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.serving import ABORTS, Serving, until

MODEL = "tandem-default"
QUESTIONS = [
    "What does textwrap.dedent do?",
    "What does os.path.join do?",
    "How do I join two paths?",
    "Explain json.dumps.",
    "What is shutil.copyfile for?",
    "Tell me about math.gcd.",
    "What does random.shuffle do?",
    "What does heapq.heappush do?",
]


def ask(client: openai.OpenAI, question: str, **more: object) -> str:
    reply = client.completions.create(model=MODEL, prompt=question, max_tokens=96, temperature=0, **more)  # type: ignore[call-overload]
    text: str = reply.choices[0].text
    return text


def test_a_trained_question_gets_the_trained_answer(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=QUESTIONS[0], max_tokens=96, temperature=0)
    choice = reply.choices[0]
    assert "common leading whitespace" in choice.text
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.completion_tokens < 96


def test_a_stream_equals_the_whole_response(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTIONS[1])
    stream = client.completions.create(
        model=MODEL,
        prompt=QUESTIONS[1],
        max_tokens=96,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"


def test_32_concurrent_clients_get_the_output_of_a_single_one(client: openai.OpenAI, serving: Serving) -> None:
    alone = {question: ask(client, question) for question in QUESTIONS}
    with ThreadPoolExecutor(32) as pool:
        questions = QUESTIONS * 8
        answers = list(pool.map(lambda question: ask(client, question), questions))
    assert answers == [alone[question] for question in questions]
    until(serving.rows_and_pages_are_free, "rows and pages to come back")


def test_choices_differ_and_seeds_repeat(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        reply = client.completions.create(
            model=MODEL, prompt="Tell me about", max_tokens=24, temperature=2, seed=seed, n=3
        )
        return [choice.text for choice in sorted(reply.choices, key=lambda choice: choice.index)]

    first = draw(7)
    assert first == draw(7)
    assert first != draw(8)
    assert len(set(first)) == 3


def test_a_json_schema_without_bounds_is_answered_whole(client: openai.OpenAI) -> None:
    """The example of the README."""
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    (block,) = (found for found in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S) if "schema = " in found)
    names: dict[str, Any] = {"client": client}
    exec(block, names)
    assert "maxLength" not in block and names["reply"].usage.completion_tokens <= 128
    (choice,) = names["reply"].choices
    assert choice.finish_reason == "stop"
    answer = json.loads(choice.message.content)
    assert answer.keys() == {"summary"} and "common leading whitespace" in answer["summary"]


def test_a_stop_string_is_never_part_of_the_text(client: openai.OpenAI) -> None:
    whole = ask(client, QUESTIONS[0])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    assert ask(client, QUESTIONS[0], stop=[stop]) == whole[: whole.index(stop)]


def test_a_prompt_longer_than_a_step_is_chunked(client: openai.OpenAI) -> None:
    ids = [100 + i % 500 for i in range(1200)]
    reply = client.completions.create(
        model=MODEL, prompt=ids, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (1200, 4)


def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        client.completions.create(model=MODEL, prompt=[5] * 2048, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_drops_frees_its_rows(client: openai.OpenAI, serving: Serving) -> None:
    aborts = serving.fresh_engine_metric(ABORTS)
    streams = [
        client.completions.create(
            model=MODEL, prompt=question, max_tokens=1800, stream=True, extra_body={"ignore_eos": True}
        )
        for question in QUESTIONS
    ]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    # The engine learns of a closed stream later: gauges that are read before its abort say nothing.
    until(lambda: serving.engine_metric(ABORTS) >= aborts + len(streams), "the dropped streams to be aborted")
    until(serving.rows_and_pages_are_free, "rows and pages of dropped clients to come back")
    assert serving.fresh_engine_metric(ABORTS) == aborts + len(streams)


def test_a_frontend_that_has_served_has_not_loaded_torch(client: openai.OpenAI, serving: Serving) -> None:
    assert ask(client, QUESTIONS[2])
    maps = [m.path for m in serving.child("tandem.frontend").memory_maps()]
    assert any("tokenizers" in path for path in maps), "the maps can be read"
    assert not [path for path in maps if "torch" in path]
    engine = [m.path for m in serving.child("tandem.engine_core").memory_maps()]
    assert any("libtorch" in path for path in engine)


def test_an_engine_on_a_cpu_needs_neither_triton_nor_flashinfer(client: openai.OpenAI, serving: Serving) -> None:
    assert ask(client, QUESTIONS[3])
    environment = serving.child("tandem.engine_core").environ()
    for name in ("triton", "flashinfer"):
        code = f"import {name}"
        done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=False)
        assert b"is blocked" in done.stderr, "the engine runs where this import fails"


def test_both_ports_have_the_metrics_of_engine_and_frontends(client: openai.OpenAI, serving: Serving) -> None:
    assert ask(client, QUESTIONS[3])
    ours, ops = serving.metrics(), serving.metrics(serving.ops_port)
    for text in (ours, ops):
        assert 'tandem_time_to_first_token_seconds_count{model_name="' in text
        assert 'tandem_num_requests_waiting{model_name="' in text
    until(
        lambda: (
            serving.engine_metric("tandem_engine_steps_committed_total")
            == serving.engine_metric("tandem_engine_steps_launched_total")
            > 0
        ),
        "every launched step to be committed",
    )
    assert psutil.pid_exists(serving.child("tandem.engine_core").pid)
