"""Decoders and submit messages of a request's sequences."""

from msgspec import structs

from tandem.frontend.generation.admission import Admitted, AdmittedPrompt
from tandem.frontend.generation.choice import Choice
from tandem.frontend.generation.key_claim import effective_priority
from tandem.frontend.generation.request_record import RequestRecord
from tandem.frontend.generation.scored_tokens import EchoedPrompt, ScoredTokens, echoed_prompt
from tandem.frontend.generation.stop_strings import StopMatcher
from tandem.frontend.generation.tokenizer import Tokenizer
from tandem.protocol.commands import Submit
from tandem.protocol.params import SamplingParams


def new_choices(admitted: Admitted, tokenizer: Tokenizer) -> list[Choice]:
    """Build the decoders of all choices of a request."""
    options = admitted.options
    matcher = StopMatcher(options.stop, admitted.tags.think.end) if options.stop else None
    echoed = [_echoed(admitted, prompt, tokenizer) for prompt in admitted.prompts]
    return [
        _choice(admitted, index, tokenizer, matcher and matcher.fresh(), echoed[index // options.n])
        for index in range(admitted.num_choices)
    ]


def submit_command(
    admitted: Admitted, index: int, request_id: int, group: int, record: RequestRecord, lost_engines: int = 0
) -> Submit:
    """Build the message that submits a choice.

    group: id of the first choice's message. For a request that only scores its prompts, one token is generated and
    discarded.
    """
    options, prompt = admitted.options, admitted.prompt_of(index)
    sampling, constraint, logprobs = admitted.sampling, admitted.constraint, options.logprobs
    if options.max_tokens == 0:
        sampling, constraint, logprobs = SamplingParams(1, temperature=0.0, ignore_eos=True), None, None
    else:
        sampling = structs.replace(sampling, choice=index % options.n, max_tokens=prompt.max_tokens)
        if _scores(admitted) and logprobs is None:
            logprobs = 0  # neither the mean of a choice nor a prompt needs alternatives here
    return Submit(
        request_id=request_id,
        prompt_ids=prompt.packed,
        sampling=sampling,
        constraint=None if constraint is None else constraint.text,
        logprobs=logprobs,
        prompt_logprobs=options.prompt_logprobs,
        priority=effective_priority(options.priority, record.key),
        session=options.session_id,
        cache_salt=options.cache_salt,
        http_request_id=record.request_id,
        group=group,
        lost_engines=lost_engines,
        is_traced=record.is_traced,
        key=record.claim,
        constraint_seconds=0.0 if constraint is None else constraint.seconds,
        speculation=options.speculation,
        prediction=admitted.prediction,
        adapter=admitted.adapter,
        num_verified=options.num_verified,
        logits=options.logits,
    )


def _choice(
    admitted: Admitted, index: int, tokenizer: Tokenizer, matcher: StopMatcher | None, echoed: EchoedPrompt | None
) -> Choice:
    options, scored = admitted.options, None
    if _scores(admitted):
        prompt = admitted.prompt_of(index)
        scored = ScoredTokens(tokenizer.bytes_of, len(prompt.ids), len(prompt.text), echoed)
    detokenizer = tokenizer.detokenizer(options.skip_special_tokens, admitted.tags.tokens)
    return Choice(index, detokenizer, matcher, options.min_tokens, options.include_stop, scored, admitted.tags)


def _scores(admitted: Admitted) -> bool:
    """Return whether the tokens of choices need log-probabilities."""
    options = admitted.options
    wanted = (options.logprobs, options.num_returned, options.prompt_logprobs)
    return any(number is not None for number in wanted)


def _echoed(admitted: Admitted, prompt: AdmittedPrompt, tokenizer: Tokenizer) -> EchoedPrompt | None:
    """Return the echoed prompt with log-probabilities, or None if not requested."""
    options = admitted.options
    if options.prompt_logprobs is None:
        return None
    # The first token has no log-probability: of the prompt, or in front of the verified ones.
    ids = prompt.ids[-options.num_verified - 1 :] if options.num_verified else prompt.ids
    return echoed_prompt(ids, prompt.text, tokenizer.detokenizer())
