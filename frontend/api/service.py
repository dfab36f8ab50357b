"""Components shared by the routes of an app."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

from starlette.requests import Request

from tandem.frontend.access.api_keys import ApiKeys
from tandem.frontend.api.byte_budget import MAX_BODY_BYTES, MAX_STORED_BYTES, ByteBudget
from tandem.frontend.api.request_body import PendingRequests
from tandem.frontend.api.write_ticks import WriteTicks
from tandem.frontend.chat.chat import Chat, Parsers
from tandem.frontend.chat.chat_template import ChatTemplate, load_chat_template, model_types
from tandem.frontend.chat.tool_formats import ALL_TAGS
from tandem.frontend.config import FrontendConfig, frontend_name
from tandem.frontend.engine.client import EngineClient
from tandem.frontend.engine.compatibility import Fingerprints
from tandem.frontend.engine.health import EngineHealth, EngineWatch
from tandem.frontend.errors import unavailable
from tandem.frontend.generation.admission import Admission
from tandem.frontend.generation.sampling_defaults import load_sampling_defaults
from tandem.frontend.generation.tokenizer import Tokenizer, load_tokenizer
from tandem.frontend.grammar.builder import GrammarBuilder
from tandem.frontend.grammar.checker import GrammarChecker
from tandem.frontend.metrics.exposition import Exposition
from tandem.frontend.metrics.frontend_metrics import FrontendMetrics
from tandem.frontend.metrics.instruments import InstrumentRegistry
from tandem.frontend.request.conversation import Conversation
from tandem.frontend.request.ignored_fields import IGNORED_KEY, IgnoredFields
from tandem.frontend.request.served_names import ServedNames
from tandem.frontend.store.store_worker import StoreWorker, open_store_worker
from tandem.frontend.workers import Workers
from tandem.protocol.errors import ErrorCode
from tandem.protocol.events import Ready
from tandem.protocol.model_folder import read_json, template_fingerprint

_POLL_SECONDS = 0.02
LINK_SECONDS = 2.0
"""Maximum seconds after the start for which requests wait for a heartbeat of the engine."""


class Service:
    """Components and state of a frontend.

    It is serving, or draining before it exits.
    """

    def __init__(
        self,
        config: FrontendConfig,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        metrics: FrontendMetrics,
        store: StoreWorker | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        """Initialize; without `store` responses are not stored.

        sampling_defaults: defaults of sampling parameters; neutral values by default.
        """
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.store = store
        self.sampling_defaults = sampling_defaults or {}
        # One thread, so that at most one large body delays other requests at a time.
        self.parser = Workers(1, "parse")
        self.body_budget = ByteBudget(MAX_BODY_BYTES, "large bodies that are being read")
        self.stored_budget = ByteBudget(MAX_STORED_BYTES, "large answers and inputs that wait to be stored")
        self.ticks = WriteTicks(config.stream_interval)
        """Write ticks of all streams (`--stream-interval-ms`)."""
        self.pending = PendingRequests(config.max_body, self.parser, self.body_budget)
        tag_tokens = tokenizer.tag_tokens(ALL_TAGS)
        # Grammars match tag tokens by id, special or not.
        special = tokenizer.special_tokens() | {token.text: token_id for token_id, token in tag_tokens.items()}
        self.grammars = GrammarChecker(tokenizer.vocab_size, special, metrics.grammars)
        grammars = GrammarBuilder(self.grammars, self.parser, special)
        self.names = ServedNames(config.served_names)
        self.admission = Admission(
            tokenizer,
            self.parser,
            grammars,
            config.max_concurrent,
            config.limits,
            self.sampling_defaults,
            self.names,
            client.adapters,
        )
        types = model_types(read_json(config.model_dir / "config.json"))
        parsers = Parsers(config.chat.tool_parser, config.chat.reasoning_parser, types, tag_tokens)
        self.chat = Chat(template, parsers, self.admission, self.parser, metrics.templates, tokenizer.guard)
        self.keys = ApiKeys(config.api_keys, config.api_keys_file)
        self.keys.load()
        self.draining = False
        """True once the process is draining."""
        self.link_awaited = asyncio.Event()
        """Set once requests no longer wait for the first link to the engine."""
        self.metric_totals: Callable[[], Awaitable[str | None]] | None = None
        """Function that requests the metrics of all processes from a supervisor; None without one."""
        self._closing = False
        self.num_responses = 0
        """Number of generations in progress, from admission to the last byte."""

    def health(self) -> EngineHealth:
        """Return the health of the engine, with the reason if requests would be refused."""
        if self.draining:
            return EngineHealth(False, "draining", "the server is shutting down")
        return self.client.health()

    def ready(self) -> Ready:
        """Return facts and limits of the engine.

        Raises ApiError 503 with the reason while it is not ready.
        """
        if self._closing:
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        return self.client.ready()

    async def metrics_text(self) -> str:
        """Return the metrics in the text format of Prometheus.

        With a supervisor they are totals over all frontends, otherwise those of this process. Raises ApiError 503 if
        the supervisor does not respond, because counters of a single process would appear to decrease.
        """
        if self.metric_totals is None:
            return Exposition([self.metrics.registry], lambda: self.model_name).text()
        totals = await self.metric_totals()
        if totals is None:
            raise unavailable("the supervisor, which adds up the metrics of all frontends, does not answer; try later")
        return totals

    @property
    def model_name(self) -> str:
        """First served model name; "" before an engine was connected."""
        return self.names.listed(self.client.model_name)[0]

    def ignored_fields(self, request: Request, names: Mapping[str, str] = MappingProxyType({})) -> IgnoredFields:
        """Start recording the ignored fields of a request.

        They are reported in a response header and counted. names: the route's names for fields that are recorded under
        other names.
        """
        ignored = IgnoredFields(self.config.unknown_fields == "refuse", names)
        request.scope[IGNORED_KEY] = ignored
        return ignored

    async def count_tokens(
        self, model: str | None, conversation: Conversation, ignored: IgnoredFields, client: str
    ) -> int:
        """Count the tokens of a conversation's prompt.

        client: name of the API key.

        Raises ApiError for an unknown model, for a conversation that the chat template cannot render, and while the
        engine is not ready.
        """
        self.admission.named(model, self.ready().model)
        text = await self.chat.render(conversation, ignored, client)
        return len(await self.tokenizer.encode(text, False))

    async def await_link(self) -> None:
        """Wait until requests can be served, or the reason why not is known.

        It is known for a loading engine, for example. An engine without a heartbeat for `LINK_SECONDS` counts as away.
        Polls are counted instead of seconds: this process itself may be held up while the heartbeats wait.
        """
        left = LINK_SECONDS
        while (status := self.client.health().status) == "connecting" or (status == "waiting" and left > 0):
            await asyncio.sleep(_POLL_SECONDS)
            left -= _POLL_SECONDS
        self.link_awaited.set()

    def end_requests(self) -> None:
        """Fail all open requests, and refuse new ones."""
        self.draining = self._closing = True
        self.pending.end_all()
        self.client.end_all(ErrorCode.SHUTTING_DOWN, "the server is shutting down")

    def start(self) -> None:
        """Start connecting to the engine, and start the template process."""
        self.client.start()
        self.chat.start()

    async def close(self) -> None:
        """Close the link to the engine, and stop threads and processes."""
        await self.client.stop()
        self.tokenizer.close()
        self.parser.close()
        if self.store is not None:
            await self.store.close()
        await self.grammars.close()
        await self.chat.close()


def build_service(config: FrontendConfig) -> Service:
    """Build the components from the settings of one process.

    Raises TokenizerError if the model directory has no usable tokenizer, ChatTemplateError for a chat template that
    cannot be used, StoreError for a store that cannot be opened.
    """
    metrics = FrontendMetrics(InstrumentRegistry())
    tokenizer = load_tokenizer(config.model_dir, no_special_tokens_in_text=config.no_special_tokens_in_text)
    watch = EngineWatch(config.beat_timeout, config.step_timeout, hang_timeout=config.hang_timeout)
    # A template given to the frontend may differ.
    template_print = template_fingerprint(config.model_dir) if config.chat.template is None else ""
    fingerprints = Fingerprints(tokenizer.fingerprint, template_print)
    client = EngineClient(
        config.endpoint,
        config.transport,
        fingerprints,
        watch,
        metrics,
        hold_timeout=config.hold_timeout,
        name=frontend_name(config.slot),
    )
    template = load_chat_template(config.model_dir, config.chat.template, tokenizer)
    store = open_store_worker(config.state_dir, config.store_limits, metrics) if config.store else None
    defaults = load_sampling_defaults(config.model_dir) if config.generation_config == "auto" else {}
    service = Service(config, client, tokenizer, template, metrics, store, defaults)
    load = metrics.load
    load.arriving.set_function(lambda: len(service.pending))
    load.responses.set_function(lambda: service.num_responses)
    load.held.set_function(lambda: client.num_held)
    load.queued_tokens.set_function(lambda: client.queued_tokens)
    load.body_bytes.set_function(lambda: service.body_budget.used)
    load.stored_bytes.set_function(lambda: service.stored_budget.used)
    return service
