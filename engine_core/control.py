"""Commands of frontends, validated and applied to the scheduler.

A bad token id would trigger a device assertion, which is fatal for every request, so everything is checked here.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable

import numpy as np
from msgspec import structs

from tandem.engine_core.adapter import Adapter
from tandem.engine_core.contracts import Compiler, UpdateCommand, WeightChange, WeightUpdates
from tandem.engine_core.errors import RequestError
from tandem.engine_core.key_limits import KeyLimits
from tandem.engine_core.kv_cache.sessions import scoped
from tandem.engine_core.lora.adapters import Adapters, CallResult
from tandem.engine_core.lora.announcements import Announcements
from tandem.engine_core.scheduler.inspection import inspect
from tandem.engine_core.scheduler.pause import PauseSwitch
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.scheduler.sleep_switch import SleepSwitch, problem_of
from tandem.engine_core.scheduler.weight_switch import WeightSwitch
from tandem.engine_core.sequence import Sequence
from tandem.engine_core.stats import count_outcome
from tandem.engine_core.weight_swaps import WeightSwaps
from tandem.protocol.codec import ID_BYTES, unpack_floats, unpack_ids
from tandem.protocol.commands import (
    MAX_NAME_BYTES,
    MAX_PRIORITY,
    MAX_VERIFIED,
    Abort,
    AnyCommand,
    CancelSwap,
    EndSession,
    FinishWeightUpdate,
    Goodbye,
    Hello,
    InitWeightTransfer,
    Inspect,
    InspectSwap,
    KeyClaim,
    LoadAdapter,
    Pause,
    Renew,
    ResetPrefixCache,
    Resume,
    SetPolicy,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)
from tandem.protocol.engine_options import POLICIES
from tandem.protocol.errors import ErrorCode, ProtocolError
from tandem.protocol.events import Answer, AnyEvent, Closed, Failure, Limits, ModelFacts, Ready, Refused
from tandem.protocol.logs import printable
from tandem.protocol.params import (
    MAX_GRAMMAR_CHARS,
    MAX_LOGIT_BIAS,
    MAX_SEED,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SAMPLING_FIELDS,
    SamplingParams,
)
from tandem.protocol.rate_limited_log import RateLimitedLog
from tandem.protocol.stats import EngineStats
from tandem.protocol.version import PROTOCOL_VERSION, protocol_remedy

logger = logging.getLogger(__name__)

_LOGGED_NAME = 64
"""Characters of a frontend's name, or of another that it sends, that messages repeat."""

_ASLEEP = "the weights are asleep, or about to be; wake them first (POST /wake_up?tags=weights)"


class Control:
    """Applies the commands of connected frontends."""

    def __init__(
        self,
        scheduler: Scheduler,
        compiler: Compiler,
        epoch: int,
        model: ModelFacts,
        limits: Limits,
        stats: EngineStats,
        clock: Callable[[], float],
        weights: WeightSwitch | None = None,
        swaps: WeightSwaps | None = None,
        sleep: SleepSwitch | None = None,
    ) -> None:
        """Keep the parts; swaps, sleep: None on an engine whose weights stay.

        `scheduler.adapters` is None on an engine that takes no adapters.
        """
        self.scheduler = scheduler
        self.compiler = compiler
        self.epoch = epoch
        self.model = model
        self.limits = limits
        self.stats = stats
        self.clock = clock
        self.pause = PauseSwitch()
        self.weights = weights or WeightSwitch()
        scheduler.memory.weights = self.weights.version
        self.swaps = swaps
        self.sleep = sleep or SleepSwitch()
        self.clients: dict[bytes, str] = {}
        self._identities: dict[bytes, bytes] = {}
        """The object used for each identity, regardless of the message that carried it: `Scheduler.commit` compares
        by `is`."""
        self.key_limits = KeyLimits(clock)
        self._announcements = Announcements(clock)
        self._refused: dict[bytes, tuple[int, Failure]] = {}
        """Last group refused for overload or a limit of its key, with the refusal, by frontend."""
        self._first_of_group: dict[bytes, int] = {}
        """Last group that was accepted while no other prompt waited, by frontend."""
        self.updates: WeightUpdates | None = None
        """Updates of the weights by trainers; None: there are none."""
        self.on_resume: Callable[[], None] = lambda: None
        """Called at each resume."""
        self._sequences = 0
        self._log = RateLimitedLog(logger, clock)

    def apply(self, client: bytes, command: AnyCommand) -> AnyEvent | Failure | None:
        """Apply one command of a frontend.

        Return the event to send back, if there is one.
        """
        if isinstance(command, Hello):
            return self._hello(client, command)
        if client not in self.clients:
            if isinstance(command, Renew):
                return Closed("the engine has no connection with this frontend; it was silent, or did not read")
            self._log.warning("hello", "ignored %s from %s before its Hello", type(command).__name__, client.hex())
            return None
        match command:
            case Submit():
                return self._submit(client, command)
            case Abort(request_ids, reason):
                for request_id in request_ids:
                    self.scheduler.abort(client, request_id, reason)
            case Goodbye():
                self.forget(client)
                self.scheduler.abort_client(client)
            case EndSession(call, session):
                if len(session) > MAX_NAME_BYTES:
                    return Answer(call, False, f"session names have at most {MAX_NAME_BYTES} bytes")
                known = self.scheduler.memory.sessions.end(scoped(command.key, session))
                return Answer(call, known, "" if known else f"session {session!r} does not exist")
            case SetPolicy(call, policy):
                return self._set_policy(call, policy)
            case Inspect(call):
                return inspect(self.scheduler, call, self.stats, self.clock(), self.pause.mode, self.pause.refuses_new)
            case LoadAdapter() | UnloadAdapter():
                return self._change_adapters(client, command)
            case ResetPrefixCache(call):
                is_empty = self.scheduler.memory.reset_prefix_cache()
                return Answer(call, is_empty, "" if is_empty else "requests in progress hold some of its pages")
            case InitWeightTransfer() | StartWeightUpdate() | UpdateWeights() | FinishWeightUpdate():
                return self._update_weights(client, command)
            case Renew(adapter_changes):
                self._announcements.note(client, adapter_changes)
            case SwapWeights() | CancelSwap() | InspectSwap():
                if self.swaps is None:
                    return Answer(command.call, False, "this engine keeps its weights; see --enable-weight-updates")
                if isinstance(command, SwapWeights):
                    if command.activate and (problem := self._swap_refusal(command)):
                        return Answer(command.call, False, problem, swap=self.swaps.facts)
                    logger.info("%s swaps to the weights of %s", self.clients[client], printable(command.path))
                return self.swaps.apply(client, command)
            case Sleep() | WakeUp():
                return self._sleep(client, command)
            case Pause():
                self._pause(client, command)
            case Resume(call):
                logger.info("resumed by %s", self.clients[client])
                self.pause.end(client, call)
                self.on_resume()
        return None

    def forget(self, client: bytes) -> bool:
        """End the connection of a frontend; return whether there was one."""
        self._identities.pop(client, None)
        self._refused.pop(client, None)
        self._first_of_group.pop(client, None)
        self.pause.forget(client)
        self._announcements.forget(client)
        return self.clients.pop(client, None) is not None

    def _hello(self, client: bytes, hello: Hello) -> Ready | Refused | None:
        """Open a connection; ignore a Hello that was sent to an earlier engine."""
        name = printable(hello.name[:_LOGGED_NAME])
        if hello.protocol_version != PROTOCOL_VERSION:
            return Refused(
                f"{name} speaks protocol {hello.protocol_version}, the engine {PROTOCOL_VERSION}; "
                f"{protocol_remedy(hello.protocol_version, PROTOCOL_VERSION)}"
            )
        if hello.engine_epoch != self.epoch:
            self._log.warning("epoch", "ignored a Hello of %s for another engine", name)
            return None
        self.clients[client] = name
        self._identities[client] = client
        if (adapters := self.scheduler.adapters) is None:
            return Ready(PROTOCOL_VERSION, self.epoch, self.model, self.limits)
        self._announcements.note(client, adapters.changes)
        return Ready(PROTOCOL_VERSION, self.epoch, self.model, self.limits, adapters.listed)

    def _set_policy(self, call: int, asked: str) -> Answer:
        """Change the scheduling policy, if it exists and this engine can run it."""
        policy = next((name for name in POLICIES if name == asked), None)
        if policy is None:
            name = asked[:_LOGGED_NAME]
            return Answer(call, False, f"policy {name!r} does not exist; choose one of {', '.join(POLICIES)}")
        if self.scheduler.limits.static and policy != "fcfs":
            return Answer(call, False, f"policy {policy} needs --batching continuous, this engine runs static batches")
        self.scheduler.set_policy(policy)
        self._log.info("policy", "policy %s", policy)
        return Answer(call, True)

    def _change_adapters(self, client: bytes, command: LoadAdapter | UnloadAdapter) -> Answer | None:
        """Start loading an adapter, or unload one; it is answered at the end, or at once if that is refused."""
        adapters, call = self.scheduler.adapters, command.call
        name = printable(command.name[:_LOGGED_NAME])
        if adapters is None:
            return Answer(call, False, "this engine takes no adapters; start it with --enable-lora")
        if isinstance(command, LoadAdapter):
            if not command.name or len(command.name.encode()) > MAX_NAME_BYTES:
                return Answer(call, False, f"an adapter's name has 1 to {MAX_NAME_BYTES} bytes in UTF-8")
            logger.info("%s loads the adapter %s from %s", self.clients[client], name, printable(command.path))
            given = command.name, command.path, command.load_inplace, command.root
            problem = adapters.load(client, call, *given, self.weights.version.name)
        else:
            logger.info("%s unloads the adapter %s", self.clients[client], name)
            problem = adapters.unload(client, call, command.name)
        return Answer(call, False, problem, adapters=adapters.listed) if problem else None

    def take_adapter_results(self, adapters: Adapters) -> list[CallResult]:
        """Return the results of calls that all frontends know of by now."""
        for result in adapters.take_answers():
            self._announcements.add(result, adapters.changes)
        return self._announcements.take(self.clients)

    def _update_weights(self, client: bytes, command: UpdateCommand) -> Answer | None:
        """Carry out a call of a trainer; it is answered at its end, or at once if it is refused."""
        call = command.call
        if self.updates is None:
            return Answer(call, False, "the weights cannot be updated; start the engine with --enable-weight-updates")
        if not isinstance(command, InitWeightTransfer) and (problem := self._update_refusal()):
            return Answer(call, False, self.updates.refuse(command, problem))

        def reply(problem: str) -> None:
            self.weights.reply(client, Answer(call, not problem, problem))

        was_receiving = self.updates.is_receiving
        self.updates.call(command, "restart" if self.pause.clear_cache else "keep", reply)
        if was_receiving and not self.updates.is_receiving and self.weights.change is None:
            self._note_abandoned("another update was begun before the last one was finished")
        return None

    def _update_refusal(self) -> str:
        """Return why the weights cannot be updated now, "" if they can."""
        if self.sleep.takes_weights:
            return _ASLEEP
        is_paused = self.pause.holds_rows or (self.pause.mode == "wait" and not self.scheduler.num_begun)
        # Asleep, or without complete weights, it computes nothing either.
        is_paused = is_paused or self.sleep.holds_rows or bool(self.weights.problem)
        return "" if is_paused else "the engine runs; pause it before an update of its weights"

    def _find_adapter(self, name: str) -> Adapter | None:
        """Return the adapter of a request. Raises RequestError if it is not loaded."""
        if not name:
            return None
        if self.scheduler.adapters is None:
            raise RequestError(ErrorCode.MODEL_NOT_FOUND, "this engine takes no adapters; start it with --enable-lora")
        return self.scheduler.adapters.find(name)

    def _pause(self, client: bytes, command: Pause) -> None:
        """Begin a pause; its mode may end every open request."""
        logger.info(
            "paused by %s, mode %s, requests that arrive %s",
            self.clients[client],
            command.mode,
            "are refused" if command.refuse_new else "wait",
        )
        self.pause.begin(client, command)
        if command.mode == "abort":
            message = "the engine was paused, which ended its open requests (mode abort); try again later"
            self.scheduler.fail_all(ErrorCode.ENGINE_PAUSED, message)

    def _sleep(self, client: bytes, command: Sleep | WakeUp) -> Answer | None:
        """Begin a sleep or a wake; it is answered at the end, or at once if it is refused."""
        call = command.call
        if self.sleep.memory is None:
            return Answer(call, False, "this engine does not sleep; start it with --enable-weight-updates")
        if problem := problem_of(command) or (isinstance(command, Sleep) and self._sleep_refusal(command)):
            return Answer(call, False, problem)
        name = self.clients[client]
        if isinstance(command, WakeUp):
            logger.info("%s wakes %s", name, " and ".join(command.tags) or "everything")
            self.sleep.begin_wake(client, command)
            return None
        if not self.sleep.begin(client, command):
            logger.info("%s asks for a sleep, but the engine already sleeps at level %d", name, self.sleep.level)
            return None
        logger.info("%s has the engine sleep at level %d, mode %s", name, command.level, command.mode)
        if command.mode == "abort":
            message = "the engine was put to sleep, which ended its open requests (mode abort); try again later"
            self.scheduler.fail_all(ErrorCode.ENGINE_SLEEPING, message)
        return None

    def _sleep_refusal(self, command: Sleep) -> str:
        """Return why the engine cannot sleep now, "" if it can."""
        weights, num_open = self.weights, self.scheduler.num_open
        if weights.change is not None or (self.swaps is not None and self.swaps.is_activating):
            return "the weights are being replaced; wait for the end of the swap or update, or cancel it"
        # One may begin with weights that have a problem, as after a failed update or a sleep of level 2.
        is_updating = self.updates is not None and self.updates.is_receiving
        if is_updating or (not weights.is_complete and not weights.problem):
            return "an update of the weights is in progress; finish it first"
        if command.mode == "wait" and self.pause.mode is not None and num_open:
            return _never_end(num_open, "use another mode")
        return ""

    def _swap_refusal(self, command: SwapWeights) -> str:
        """Return why weights cannot be swapped now, "" if they can."""
        if self.sleep.takes_weights:
            return _ASLEEP
        if command.running == "wait" and self.pause.holds_rows and (num_begun := self.scheduler.num_begun):
            return _never_end(num_begun, "swap with running abort or restart")
        return ""

    def advance_updates(self) -> None:
        """Continue the calls of a trainer, and abandon an update during which the engine was resumed."""
        if self.updates is None:
            return
        self.updates.advance()
        weights = self.weights
        if weights.is_complete or weights.problem or weights.change is not None or self.pause.mode is not None:
            return
        if self.sleep.holds_rows:
            return
        self.updates.abandon()
        self._note_abandoned("the engine was resumed in the middle of an update")

    def _note_abandoned(self, problem: str) -> None:
        """End every request, since the weights stay incomplete. problem: why."""
        self.weights.problem = problem
        message = f"the weights are incomplete: {problem}; swap or update them completely"
        self.scheduler.fail_all(ErrorCode.WEIGHTS_CHANGED, message)

    def advance_swaps(self, now: float) -> None:
        """Begin the change of a swap once its checkpoint is staged. now: seconds."""
        if self.swaps is not None and (change := self.swaps.advance(now)) is not None:
            self.begin_change(change)

    def begin_change(self, change: WeightChange) -> None:
        """Make a change of the weights due; it may end the sequences that have begun."""
        self.weights.begin(change)
        if change.running == "abort":
            message = "the weights are being replaced, which ended the requests in progress; try again"
            self.scheduler.fail_begun(ErrorCode.WEIGHTS_CHANGED, message)

    def _submit(self, client: bytes, submit: Submit) -> Failure | None:
        """Accept a request, or return the failure that ends it at once."""
        if not 0 <= submit.request_id < 2**64:
            template = "%s used request id %d, which is not a uint64; ignored"
            self._log.warning("id", template, self.clients[client], submit.request_id)
            return None
        if self.scheduler.is_open(client, submit.request_id):
            template = "%s reused open request id %d (HTTP request %.128r); ignored"
            self._log.warning("reused", template, self.clients[client], submit.request_id, submit.http_request_id)
            return None
        if self.pause.refuses_new:
            message = "the engine is paused and refuses requests until it is resumed; try again later"
            refusal = Failure(submit.request_id, ErrorCode.ENGINE_PAUSED, message)
            count_outcome(self.stats, refusal)
            return refusal
        if self.sleep.refuses_new:
            message = "the engine sleeps, or is about to, and refuses requests until it is woken; try again later"
            refusal = Failure(submit.request_id, ErrorCode.ENGINE_SLEEPING, message)
            count_outcome(self.stats, refusal)
            return refusal
        if self.weights.problem:
            message = f"the weights are incomplete: {self.weights.problem}; swap or update them completely"
            refusal = Failure(submit.request_id, ErrorCode.WEIGHTS_CHANGED, message)
            count_outcome(self.stats, refusal)
            return refusal
        known = self._refused.get(client)
        if known is not None and submit.group and submit.group == known[0]:
            return structs.replace(known[1], request_id=submit.request_id)
        claim = submit.key if submit.key is not None and submit.key.has_limits else None
        try:
            self._check_load(client, submit)
            if claim is not None and not submit.lost_engines:
                self._check_key(claim, submit.group in (0, submit.request_id))
            seq = self._sequence(client, submit)
            self.scheduler.add(seq)
        except RequestError as error:
            refusal = Failure(submit.request_id, error.code, error.message, error.retry_after)
            if error.code in (ErrorCode.OVERLOADED, ErrorCode.RATE_LIMITED):
                self._refused[client] = (submit.group, refusal)
            count_outcome(self.stats, refusal)
            return refusal
        if claim is not None:
            self.key_limits.begin(claim, seq)
        self.stats.requests_accepted += 1
        if submit.constraint is not None:
            self.stats.requests_constrained += 1
            key = submit.key.name if submit.key is not None else ""
            ignores_ends = submit.sampling.ignore_eos
            self.compiler.start(seq.id, submit.constraint, ignores_ends, key, submit.constraint_seconds)
        return None

    def _check_key(self, claim: KeyClaim, is_first: bool) -> None:
        """Raise RequestError if a sequence would exceed a limit of its API key."""
        if (refusal := self.key_limits.refusal(claim, is_first)) is not None:
            raise RequestError(ErrorCode.RATE_LIMITED, *refusal)

    def _check_load(self, client: bytes, submit: Submit) -> None:
        """Raise RequestError if one more sequence would exceed a limit on load.

        The limits apply to all frontends together. A request of any length is taken while no other prompt waits, with
        all sequences of its group.
        """
        num_open, queued, limits = self.scheduler.num_open, self.scheduler.queued.num_tokens, self.limits
        if num_open >= limits.max_concurrent:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{num_open} sequences are open, at most {limits.max_concurrent} (--max-concurrent); try again later",
            )
        if not queued:
            self._first_of_group[client] = submit.group
        elif submit.group and submit.group == self._first_of_group.get(client):
            return
        prompt_len = len(submit.prompt_ids) // ID_BYTES if submit.sampling.choice == 0 else 0
        if queued and queued + prompt_len > limits.max_queued_tokens:
            raise RequestError(
                ErrorCode.OVERLOADED,
                f"{queued} prompt tokens are waiting and this request has {prompt_len} more; the limit is "
                f"{limits.max_queued_tokens} (--max-queued-tokens); try again later",
            )

    def _sequence(self, client: bytes, submit: Submit) -> Sequence:
        """Build the sequence of a request.

        Raises RequestError for any value that the device or the scheduler's arithmetic cannot handle.
        """
        params = submit.sampling
        self._check_sizes(submit)
        try:
            prompt = _parse_prompt(submit.prompt_ids, self.model.vocab_size)
            prediction = submit.prediction[: ID_BYTES * self.limits.max_prediction]
            if prediction:
                _check_packed("prediction", prediction, self.model.vocab_size)
            stop_ids = unpack_ids(params.stop_token_ids)
            bias_ids, biases = unpack_ids(params.logit_bias_ids), unpack_floats(params.logit_bias_values)
        except ProtocolError as error:
            raise RequestError(ErrorCode.INVALID_REQUEST, str(error)) from error
        self._check_ids("stop_token_ids", stop_ids)
        self._check_ids("logit_bias", bias_ids)
        _require(len(bias_ids) == len(biases), f"{len(bias_ids)} logit_bias ids but {len(biases)} values")
        _require(all(math.isfinite(bias) for bias in biases), "a logit_bias is not finite")
        check_params(params)
        most = min(MAX_TOP_LOGPROBS, self.model.vocab_size)
        for name, top in (("logprobs", submit.logprobs), ("prompt_logprobs", submit.prompt_logprobs)):
            _require(top is None or 0 <= top <= most, f"{name} is {top}, 0 to {most}")
        _check_verified(submit, len(prompt))
        _check_scheduling(submit)
        self._check_context(len(prompt), params.max_tokens)
        end_ids = frozenset(stop_ids) if params.ignore_eos else frozenset(stop_ids) | frozenset(self.model.end_ids)
        adapter = self._find_adapter(submit.adapter)
        self._sequences += 1
        identity = self._identities[client]
        return Sequence(self._sequences, identity, _kept(submit, prediction), prompt, end_ids, self.clock(), adapter)

    def _check_sizes(self, submit: Submit) -> None:
        """Raise RequestError for a field that would take long only to be unpacked."""
        params = submit.sampling
        num_stops, num_biases = len(params.stop_token_ids) // ID_BYTES, len(params.logit_bias_ids) // ID_BYTES
        _require(num_stops <= MAX_STOP_TOKEN_IDS, f"{num_stops} stop_token_ids, at most {MAX_STOP_TOKEN_IDS}")
        num_values = len(params.logit_bias_values) // ID_BYTES
        _require(num_biases <= MAX_LOGIT_BIAS, f"{num_biases} logit_bias entries, at most {MAX_LOGIT_BIAS}")
        _require(num_values <= MAX_LOGIT_BIAS, f"{num_values} logit_bias values, at most {MAX_LOGIT_BIAS}")
        num_chars = len(submit.constraint) if submit.constraint is not None else 0
        _require(num_chars <= MAX_GRAMMAR_CHARS, f"a grammar of {num_chars} characters, at most {MAX_GRAMMAR_CHARS}")
        if len(submit.prompt_ids) // ID_BYTES > self.model.max_len:
            self._check_context(len(submit.prompt_ids) // ID_BYTES, params.max_tokens)

    def _check_context(self, prompt_len: int, max_tokens: int) -> None:
        """Raise RequestError for more tokens than the model's context holds."""
        total = prompt_len + max_tokens
        if total > self.model.max_len:
            raise RequestError(
                ErrorCode.CONTEXT_LENGTH,
                f"{prompt_len} prompt tokens and max_tokens {max_tokens} make {total}, "
                f"the model's context holds {self.model.max_len}; shorten the prompt or lower max_tokens",
            )

    def _check_ids(self, what: str, ids: list[int]) -> None:
        """Raise RequestError for the first id outside the vocabulary.

        what: name of the field.
        """
        for token in ids:
            if not 0 <= token < self.model.vocab_size:
                raise RequestError(ErrorCode.INVALID_VALUE, _outside(what, token, self.model.vocab_size))


def _never_end(count: int, remedy: str) -> str:
    """Return why a call does not wait for a number of requests. remedy: other than to resume."""
    which = "1 request that is open does" if count == 1 else f"{count} requests that are open do"
    return f"the engine is paused, so {which} not end; resume it, or {remedy}"


def _check_verified(submit: Submit, prompt_len: int) -> None:
    """Raise RequestError unless the prompt has a token before those to verify, and their results are reported."""
    count, most = submit.num_verified, min(MAX_VERIFIED, prompt_len - 1)
    if count or submit.logits:
        _require(1 <= count <= most, f"num_verified is {count}, 1 to {most}")
        _require(submit.prompt_logprobs is not None, "verified tokens need prompt_logprobs")
        _require(
            submit.sampling.max_tokens == 1, f"verified tokens with max_tokens {submit.sampling.max_tokens}, not 1"
        )


def _kept(submit: Submit, prediction: bytes) -> Submit:
    """Return the part of a request that its sequence keeps.

    prediction: the ids of its prediction that are used. Session and salt are in the scope of its API key.
    """
    key, session, salt = submit.key, submit.session, submit.cache_salt
    if key is not None:
        session = session and scoped(key.name, session)
        salt = salt if key.shares_cache and not salt else scoped(key.name, salt)
    return structs.replace(submit, prompt_ids=b"", session=session, cache_salt=salt, prediction=prediction)


def _outside(what: str, token: int, vocab_size: int) -> str:
    return f"{what} holds token id {token}, the vocabulary has 0 to {vocab_size - 1}"


def _parse_prompt(data: bytes, vocab_size: int) -> array[int]:
    """Return the ids of a prompt.

    Raises ProtocolError and RequestError like `_check_packed`, and RequestError if the prompt is empty.
    """
    _require(len(data) > 0, "the prompt is empty; send at least one token")
    _check_packed("prompt", data, vocab_size)
    return array("i", data)


def _check_packed(what: str, data: bytes, vocab_size: int) -> None:
    """Check packed ids, at least one, without a Python loop.

    They may be many, and this runs on the engine loop's thread.

    what: name of the field; data: packed little-endian int32. Raises ProtocolError unless its length is a multiple of
    4, RequestError if it holds an id outside the vocabulary.
    """
    if len(data) % ID_BYTES:
        raise ProtocolError(f"a {what} of {len(data)} bytes does not divide into int32 ids")
    # A negative id is above all others as an unsigned number.
    if int(np.frombuffer(data, dtype="<u4").max()) >= vocab_size:
        ids = np.frombuffer(data, dtype="<i4")
        low, high = int(ids.min()), int(ids.max())
        raise RequestError(ErrorCode.INVALID_VALUE, _outside(what, low if low < 0 else high, vocab_size))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(ErrorCode.INVALID_VALUE, message)


def _check_scheduling(submit: Submit) -> None:
    """Raise RequestError for a priority or a name outside its bounds."""
    priority = submit.priority
    _require(-MAX_PRIORITY <= priority <= MAX_PRIORITY, f"priority is {priority}, {-MAX_PRIORITY} to {MAX_PRIORITY}")
    for what, name in (
        ("session_id", submit.session),
        ("cache_salt", submit.cache_salt),
        ("http_request_id", submit.http_request_id),
        ("key", submit.key.name if submit.key is not None else ""),
    ):
        size = len(name.encode())
        _require(size <= MAX_NAME_BYTES, f"{what} has {size} bytes in UTF-8, at most {MAX_NAME_BYTES}")


def check_params(params: SamplingParams) -> None:
    """Raise RequestError for a number outside its range.

    NaN and infinity are outside every range.
    """
    _require(params.max_tokens >= 1, f"max_tokens is {params.max_tokens}, at least 1")
    _require(0 <= params.min_tokens <= params.max_tokens, f"min_tokens is {params.min_tokens}, 0 to max_tokens")
    for field in SAMPLING_FIELDS:
        value = getattr(params, field.name)
        if not field.accepts(value):  # Otherwise the bounds need not be put into words.
            raise RequestError(ErrorCode.INVALID_VALUE, f"{field.name} is {value}, {field.describe_bounds()}")
    _require(0 <= params.seed <= MAX_SEED, f"seed is {params.seed}, 0 to {MAX_SEED}")
    _require(0 <= params.choice < 2**31, f"choice is {params.choice}, at least 0")
