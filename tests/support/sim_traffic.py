"""Requests of one random traffic, and the output that each must yield."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Submit
from tandem.protocol.engine_options import Policy
from tandem.protocol.errors import ErrorCode, FinishReason
from tandem.protocol.params import SamplingParams
from tests.fakes.constraint import FakeConstraint
from tests.fakes.model import END, VOCAB, reference

CLIENTS = (b"client-a", b"client-b", b"client-c")
LONGEST = 64
"""Most positions of a sequence, which is also a page size that holds any sequence whole."""
GRAMMARS: tuple[Callable[[random.Random], str], ...] = (
    lambda _: "parity",
    lambda _: "runs",
    lambda rng: f"runs {rng.randint(1, 20)}",
    lambda rng: f"stops {rng.randint(1, 20)}",
    lambda rng: f"dies {rng.randint(0, 20)}",
    lambda rng: f"breaks {rng.randint(0, 20)}",
    lambda rng: rng.choice(["parity", "bad"]),
)
"""Grammars drawn with equal probability, over the rules of `FakeConstraint`."""


@dataclass(frozen=True)
class Request:
    client: bytes
    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    session: str = ""
    cache_salt: str = ""
    speculation: bool = True
    num_verified: int = 0
    """Number of tokens at the end of the prompt that are verified."""

    @property
    def key(self) -> tuple[bytes, int]:
        return self.client, self.request_id

    @property
    def end_ids(self) -> frozenset[int]:
        return frozenset() if self.params.ignore_eos else frozenset({END})

    @property
    def submit(self) -> Submit:
        return Submit(
            self.request_id,
            pack_ids(self.prompt),
            self.params,
            self.grammar,
            self.logprobs,
            self.prompt_logprobs,
            self.priority,
            self.session,
            self.cache_salt,
            speculation=self.speculation,
            num_verified=self.num_verified,
            logits=self.num_verified > 0,
        )

    def reference(self) -> tuple[list[int], str]:
        """Return its tokens and its end: a FinishReason or an ErrorCode."""
        if self.grammar == "bad":
            return [], ErrorCode.INVALID_GRAMMAR
        constraint = FakeConstraint(self.grammar) if self.grammar else None
        params, ends = self.params, self.end_ids
        tokens = reference(self.prompt, params.max_tokens, ends, params.min_tokens, constraint)
        if constraint and constraint.problem:
            return tokens, ErrorCode.GRAMMAR_FAILED
        stopped = (tokens[-1] in ends and len(tokens) > params.min_tokens) or (constraint and constraint.is_complete)
        return tokens, FinishReason.STOP if stopped else FinishReason.LENGTH


@dataclass(frozen=True)
class Shape:
    """Parameters from which a traffic is drawn; None: drawn as well."""

    depth: int
    constrained: float
    faults: str = ""
    cache: bool | None = None
    page_size: int | None = None
    pages: tuple[int, int] = (12, 90)
    """Bounds of the pool's size in pages of one position; larger pages are fewer. A sequence may be too long for it."""
    policy: Policy | None = None
    static: bool = False
    sessions: float = 0.2
    """Share of the requests that are turns of a session."""
    requests: int = 14
    calm: bool = False
    """Whether there are no aborts or interventions, so that the scheduler has to make progress on its own."""
    priorities: bool = False
    windows: tuple[int | None, ...] = (None,)
    """Window of each KV group."""
    states: tuple[int, int] | None = None
    """Bounds of the number of slots for recurrent states; None: the model has no recurrent layers."""
    drafts: int | None = None
    """Number of drafts that steps verify; 0: it follows what the rows accept; None: no step does."""
    draft_model: bool = False
    """Whether a model drafts."""


class Traffic:
    """Draws requests."""

    def __init__(self, rng: random.Random, shape: Shape) -> None:
        self.rng = rng
        self.shape = shape

    def requests(self, count: int) -> list[Request]:
        """Draw random prompts, prompts with common beginnings, and turns of conversations."""
        rng = self.rng
        beginnings = [self._tokens(rng.randint(4, 24)) for _ in range(3)]
        talks: dict[str, tuple[int, ...]] = {}
        requests: list[Request] = []
        for number in range(count):
            prompt = self._tokens(rng.randint(1, 32))
            session = ""
            if rng.random() < 0.6:
                prompt = rng.choice(beginnings) + prompt[: rng.choice([1, 3, 9])]
            if rng.random() < self.shape.sessions:
                session = rng.choice(["x", "y", "z", "w"])
                prompt = talks.get(session, ()) + prompt[:9]
                if len(prompt) > LONGEST - 20:
                    prompt = prompt[-10:]
            request = self._request(number, prompt, session)
            if session:
                talks[session] = (*prompt, *request.reference()[0])
            requests.append(request)
            if rng.random() < 0.15:
                requests[-1:] = [self._choice(request, index, count) for index in range(rng.randint(2, 4))]
        return requests

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(1, VOCAB) for _ in range(count))

    def _choice(self, request: Request, index: int, base: int) -> Request:
        """Return one of several choices for one prompt."""
        return replace(request, request_id=request.request_id + index * (base + 100), session="")

    def _request(self, number: int, prompt: tuple[int, ...], session: str) -> Request:
        rng = self.rng
        max_tokens = rng.randint(1, 18)
        grammar = rng.choice(GRAMMARS)(rng) if rng.random() < self.shape.constrained else None
        params = SamplingParams(
            max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            ignore_eos=rng.random() < 0.2,
        )
        priority = rng.choice([0, -3, 5]) if self.shape.priorities else 0
        salt = rng.choice(["", "", "", "salt"])
        tops = [rng.choice([0, 1, 5]) if rng.random() < 0.2 else None for _ in range(2)]
        drafts = number % 5 != 2
        client = rng.choice(CLIENTS)
        if number % 6 == 4 and len(prompt) > 1:
            scored = tops[1] or 0
            options = {"session": session, "cache_salt": salt, "num_verified": min(len(prompt) - 1, 5 * number)}
            return Request(client, number, prompt, SamplingParams(1), None, None, scored, priority, **options)
        return Request(client, number, prompt, params, grammar, *tops, priority, session, salt, drafts)
