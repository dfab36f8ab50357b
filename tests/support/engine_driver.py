"""Engine in this process without a wire: requests in, tokens out."""

from collections.abc import Callable, Sequence
from typing import Any

from tandem.engine_core.engine import Engine
from tandem.engine_core.scheduler.draft_costs import DraftCosts
from tandem.engine_core.startup.device import DeviceParts, open_parts
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.codec import pack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.events import Failure, Finished
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.mailbox import FakeMailbox
from tests.fakes.ticking_event import ticking
from tests.support.length_check import check_lengths

CLIENT, EPOCH = b"test", 11


class DrivenEngine:
    """An engine as `build_engine` makes it, over a mailbox that is a list."""

    def __init__(self, engine: Engine, mailbox: FakeMailbox) -> None:
        self.engine = engine
        self.mailbox = mailbox
        self._requests = 0

    @classmethod
    def build(cls, options: EngineOptions, new_parts: Callable[[str], DeviceParts] = open_parts) -> "DrivenEngine":
        mailbox = FakeMailbox()
        engine = build_engine(options, mailbox, Status(EPOCH, new_stats()), ticking(new_parts))
        drafts = engine.scheduler.planner.drafts
        # What a test sees must not depend on the speed of the machine.
        drafts.costs = DraftCosts.assumed(drafts.sizes, drafts.has_model)
        mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "test")))
        return cls(engine, mailbox)

    def submit(self, prompt: Sequence[int], params: SamplingParams, **wanted: Any) -> int:
        """Queue a request; return its id. wanted: further fields of Submit."""
        self._requests += 1
        self.mailbox.inbox.append((CLIENT, Submit(self._requests, pack_ids(prompt), params, **wanted)))
        return self._requests

    def run(self) -> None:
        """Tick until every request has ended."""
        while len(self.mailbox.outcomes) < self._requests:
            self.engine.tick()
            check_lengths(self.engine)

    def tokens(self, request_id: int) -> list[int]:
        return self.mailbox.received[CLIENT, request_id]

    def outcome(self, request_id: int) -> Finished | Failure:
        outcomes = self.mailbox.outcomes[CLIENT, request_id]
        assert len(outcomes) == 1, f"request {request_id} ended {len(outcomes)} times"
        return outcomes[0]

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        """Run all requests at once; return the tokens of each."""
        ids = [self.submit(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        self.run()
        return [self.tokens(request_id) for request_id in ids]
