"""Random requests for the default model, or any other vocabulary."""

from random import Random

from tandem.protocol.codec import pack_floats, pack_ids
from tandem.protocol.params import SamplingParams
from tests.support.plan_recording import Request

KINDS = ("greedy", "plain", "full")


def params(kind: str, rng: Random, max_tokens: int, vocab: int) -> SamplingParams:
    """Parameters that need one of the three ways of sampling."""
    seed, ignore = rng.getrandbits(63), rng.random() < 0.7
    if kind == "greedy":
        return SamplingParams(max_tokens, temperature=0.0, ignore_eos=ignore)
    if kind == "plain":
        return SamplingParams(max_tokens, temperature=rng.choice([0.3, 1.0, 1.7]), seed=seed, ignore_eos=ignore)
    bias = {rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(rng.choice([0, 0, 3, 300]))}
    return SamplingParams(
        max_tokens,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_k=rng.choice([0, 0, 1, 7, 500]),
        top_p=rng.choice([1.0, 0.95, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.4, 0.9]),
        seed=seed,
        choice=rng.randrange(4),
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        ignore_eos=ignore,
        stop_token_ids=pack_ids([rng.randrange(vocab) for _ in range(rng.choice([0, 2, 64]))]),
        logit_bias_ids=pack_ids(list(bias)),
        logit_bias_values=pack_floats(list(bias.values())),
    )


def requests(count: int, kinds: tuple[str, ...], rng: Random, longest: int, most: int, vocab: int) -> list[Request]:
    """Prompts of up to `longest` tokens, each with up to `most` tokens to generate."""
    made: list[Request] = []
    for _ in range(count):
        prompt = [rng.randrange(3, vocab) for _ in range(rng.randint(1, longest))]
        made.append((prompt, params(rng.choice(kinds), rng, rng.randint(1, most), vocab)))
    return made
