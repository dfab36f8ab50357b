"""Batches and errors of a generation, without an engine."""

import asyncio
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from tandem.frontend.api.completions.request import parse_completion
from tandem.frontend.engine.streams import ReadySet, TokenStream
from tandem.frontend.errors import ApiError
from tandem.frontend.generation.admission import Admitted, AdmittedPrompt, _sampling
from tandem.frontend.generation.detokenizer import Detokenizer
from tandem.frontend.generation.generation import Generation
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.request.ignored_fields import IgnoredFields
from tandem.protocol.commands import Submit
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.events import Failure, ModelFacts
from tests.fakes.tokenizer import byte_level_tokenizer

MODEL = ModelFacts("m", 420, 2048, [1], "", "cpu", "float32", 0)


class Streams:
    """An engine client whose streams are driven by the test."""

    num_open = 0
    num_links = 1
    facts = None
    queued_tokens = 0

    def __init__(self) -> None:
        self.streams: list[TokenStream] = []
        self.aborted: list[int] = []

    def next_id(self) -> int:
        return len(self.streams)

    def submit(self, command: Submit, choice: int, ready_set: ReadySet) -> TokenStream:
        self.streams.append(TokenStream(command.request_id, choice, ready_set))
        return self.streams[-1]

    def release(self, request: Generation) -> None:
        pass

    def abort(self, request_ids: list[int], reason: FinishReason) -> None:
        self.aborted += request_ids

    def retry_after_end(self, excess: int, sequences: int) -> int:
        return 1

    def retry_after_prefill(self, excess: int, tokens: int) -> int:
        return 1

    def load_limits(self, *own: int) -> tuple[int, ...]:
        return own

    def retry_after(self, code: ErrorCode, sequences: int, tokens: int) -> int:
        return 7

    def detokenizer(self, skip_special_tokens: bool, tags: object = None) -> Detokenizer:
        return Detokenizer(byte_level_tokenizer(), (), skip_special_tokens)


def generation(client: Any) -> Generation:
    options = parse_completion(b'{"model": "m", "prompt": [5], "n": 3}', IgnoredFields()).options
    admitted = Admitted(options, MODEL, [AdmittedPrompt("", [5], b"\x05\0\0\0", 16)], _sampling(options, {}))
    return Generation(client, client, FrontendMetrics(CollectorRegistry()), admitted, 0.0, lambda: 1.0)


def overloaded(number: int) -> Failure:
    return Failure(number, ErrorCode.OVERLOADED, "full")


def test_a_refused_choice_in_the_first_batch_fails_the_request() -> None:
    async def run() -> None:
        client = Streams()
        request = generation(client)
        request.start(10, 1000)
        client.streams[0].put([60])
        client.streams[2].end(overloaded(2))
        with pytest.raises(ApiError) as caught:
            await anext(request.batches())
        assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "overloaded", 7)
        request.close("error")
        assert client.aborted == [0, 1]

    asyncio.run(run())


def test_a_later_failure_is_raised_after_the_deltas_of_its_turn() -> None:
    async def run() -> None:
        client = Streams()
        request = generation(client)
        request.start(10, 1000)
        batches = request.batches()
        client.streams[0].put([60])
        assert [piece.index for piece in await anext(batches)] == [0]
        client.streams[1].put([60])
        client.streams[2].end(overloaded(2))
        assert [piece.index for piece in await anext(batches)] == [1]
        with pytest.raises(ApiError):
            await anext(batches)
        request.close("error")

    asyncio.run(run())


def test_each_prompt_is_submitted_with_its_own_max_tokens() -> None:
    class Lengths(Streams):
        def submit(self, command: Submit, choice: int, ready_set: ReadySet) -> TokenStream:
            lengths.append(command.sampling.max_tokens)
            return super().submit(command, choice, ready_set)

    async def run() -> None:
        request = generation(Lengths())
        prompt = request.admitted.prompts[0]
        request.admitted = structs.replace(request.admitted, prompts=[prompt, structs.replace(prompt, max_tokens=3)])
        request.start(10, 1000)
        request.close("error")

    lengths: list[int] = []
    asyncio.run(run())
    assert lengths == [16] * 3 + [3] * 3
