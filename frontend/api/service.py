"""What the routes of one app share."""

import asyncio

from tandem.frontend.api.body import Arrivals, BodyBudget
from tandem.frontend.chat.chat import Chat
from tandem.frontend.chat.chat_template import ChatTemplate, model_type
from tandem.frontend.chat.tool_formats import tool_format
from tandem.frontend.config import FrontendConfig
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.health import Verdict
from tandem.frontend.errors import unavailable
from tandem.frontend.generation.admission import Admission
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.grammar.constraints import Constraints
from tandem.frontend.grammar.tags import CLOSE
from tandem.frontend.metrics import FrontendMetrics
from tandem.frontend.workers import Workers
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Ready

_POLL_SECONDS = 0.05
_FLUSH_SECONDS = 1.0
"""What responses get to write their error events once their streams have been ended."""


class Service:
    """The parts of a frontend and its one state: serving, or draining on the way out."""

    def __init__(
        self,
        config: FrontendConfig,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        metrics: FrontendMetrics,
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.bodies = BodyBudget()
        self.arrivals = Arrivals(self.bodies)
        # One thread: what is large is taken in turn, so that requests beside it wait for one decoder at most.
        self.parser = Workers(1, "parse")
        special = tokenizer.special_tokens()
        self.grammars = GrammarChecker(tokenizer.vocab_size, special)
        constraints = Constraints(self.grammars, self.parser, special)
        self.admission = Admission(tokenizer, self.parser, constraints, config.max_concurrent, config.limits)
        self.renderer = Workers(1, "render")
        form = tool_format(config.chat.tool_parser, model_type(config.model_dir))
        close_id = tokenizer.token_id(CLOSE)
        self.chat = Chat(template, form, config.chat.reasoning_parser, close_id, self.admission, self.renderer)
        self.draining = False
        self.replies = 0
        """Completions being answered, from admission to the last byte."""

    def verdict(self) -> Verdict:
        """Whether a request would be taken now, and if not, why."""
        if self.draining:
            return Verdict(False, "draining", "the server is shutting down")
        return self.client.verdict()

    def ready(self) -> Ready:
        """Facts and limits of the engine. Raises ApiError 503 with the reason."""
        if self.draining:
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        return self.client.ready()

    async def drain(self) -> None:
        """Takes nothing new, gives what is open its grace period, then ends the rest with an error."""
        self.draining = True
        await self._until_answered(self.config.drain_timeout)
        self.arrivals.end_all()
        self.client.fail_all(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        await self._until_answered(_FLUSH_SECONDS)

    async def close(self) -> None:
        """Ends the link to the engine and the threads."""
        await self.client.stop()
        self.tokenizer.close()
        self.parser.close()
        self.renderer.close()
        await self.grammars.close()

    async def _until_answered(self, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        while (self.replies or len(self.arrivals)) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
