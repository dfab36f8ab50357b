"""A request of the fake engine, and the log-probabilities of its tokens."""

from msgspec import Struct

from tandem.protocol.codec import pack_floats, pack_ids, unpack_ids
from tandem.protocol.commands import Submit
from tandem.protocol.events import InspectedSequence, TokenLogprobs


def fake_logprob(position: int, token: int) -> float:
    """Return the log-probability of a token, a multiple of 1/8 that float32 represents exactly."""
    return -(position % 5 + 1 + token % 8 / 8)


def fake_line(position: int, token: int, top: int) -> bytes:
    """Pack one record of `TokenLogprobs`: the token, then ids 2, 3, ... with probability 0."""
    values = [fake_logprob(position, token), *[float("-inf")] * top]
    return pack_floats(values) + pack_ids(range(2, 2 + top))


class Running(Struct):
    """A request without a terminal event yet."""

    identity: bytes
    submit: Submit
    tokens: list[int]
    ends_by_itself: bool
    position: int
    """Position of the next token."""

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    def logprobs(self, count: int) -> list[TokenLogprobs]:
        """Return those of the next `count` tokens, and of the prompt ahead of the first."""
        submit, prompt = self.submit, unpack_ids(self.submit.prompt_ids)
        parts: list[TokenLogprobs] = []
        top = submit.prompt_logprobs
        if top is not None and self.position == len(prompt) > 1:
            first = len(prompt) - submit.num_verified if submit.num_verified else 1
            half = (first + len(prompt) + 1) // 2
            for start, end in ((first, half), (half, len(prompt))):
                lines = b"".join([fake_line(at, prompt[at], top) for at in range(start, end)])
                parts.append(TokenLogprobs(submit.request_id, start, top, lines))
        if submit.logprobs is not None and count:
            tokens = enumerate(self.tokens[:count], self.position)
            lines = b"".join([fake_line(at, token, submit.logprobs) for at, token in tokens])
            parts.append(TokenLogprobs(submit.request_id, self.position, submit.logprobs, lines))
        return parts

    def inspected(self, row: int, cached_tokens: int) -> InspectedSequence:
        return InspectedSequence(
            client=self.identity.hex(),
            request_id=self.request_id,
            state="decode",
            row=row,
            prompt_len=len(self.submit.prompt_ids) // 4,
            generated=0,
            launched=self.position,
            pages=1,
            shared_pages=0,
            cached_tokens=cached_tokens,
            priority=self.submit.priority,
            preemptions=0,
            age=1.5,
            session=self.submit.session,
            http_request_id=self.submit.http_request_id,
        )
