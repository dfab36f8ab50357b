"""Random rows for the sampling kernels, and what the torch oracle makes of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.philox import gumbel_noise
from tandem.engine_core.kernels.reference.sampling import truncate
from tandem.engine_core.kernels.sampling.greedy import ID_BITS, ID_MASK
from tandem.engine_core.sampling.device_sampler import DeviceSampler
from tandem.engine_core.sampling.sampler import Bias, Draw, Penalties, SamplingRows, Truncation, adjust

BIASES = 16
ENDS = 5
NEAR_TOKEN = 3e-5
"""Sums of score and noise closer than this may change places: the kernel's noise is right to about 3e-6."""
NEAR_MASS = 5e-6
"""A cumulative probability this close to top-p may fall on either side."""


@dataclass
class Case:
    """Tables of R rows, padding row 0 among them, and the rows of one step."""

    tokens: Tensor
    ints: Tensor
    floats: Tensor
    bias: Tensor
    suppressed: Tensor
    rows: Tensor
    positions: Tensor
    suppress: Tensor
    logits: Tensor
    allowed: Tensor | None = None

    def sampler(self, **sizes: int) -> DeviceSampler:
        vocab = self.logits.shape[1]
        tables = (self.tokens, self.ints, self.floats, self.bias, self.suppressed)
        return DeviceSampler(*tables, vocab, len(self.rows), **sizes)

    def sampling_rows(self, full: bool) -> SamplingRows:
        rows, positions = self.rows.long(), self.positions.long() + 1
        ints, floats = self.ints[rows].unbind(1), self.floats[rows].unbind(1)
        draw = Draw(temperature=floats[0], seed=ints[4], choice=ints[3], position=positions)
        if not full:
            return SamplingRows(draw)
        bias = self.bias.view(2, len(self.tokens), -1)[:, rows]
        ends = torch.where(self.suppress.bool().unsqueeze(1), self.suppressed[rows], -1)
        return SamplingRows(
            draw,
            Truncation(ints[2], floats[1], floats[2]),
            Penalties(floats[3], floats[4], floats[5], self.tokens[rows].long(), ints[1], positions),
            Bias(bias[0].long(), bias[1].view(torch.float32)),
            ends.long(),
        )

    def to(self, device: str) -> "Case":
        moved = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Case(**moved)


def make_case(batch: int, vocab: int, seed: int = 0, max_len: int = 40, scale: float = 3.0) -> Case:
    """Rows that draw from the softmax of the whole vocabulary until a test says otherwise."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    count = batch + 3
    tokens = integer(0, vocab, count, max_len).int()
    ints = torch.zeros(count, 6, dtype=torch.int64)
    ints[:, 1] = integer(1, max_len // 2, count)
    ints[:, 3] = integer(0, 5, count)
    ints[:, 4] = integer(0, 2**63 - 1, count)
    floats = torch.zeros(count, 6)
    floats[:, 0] = torch.rand(count, generator=generator) + 0.3
    floats[:, 1] = 1
    floats[:, 3] = 1
    ints[0], floats[0], tokens[0] = 0, 0, 0
    bias = torch.full((2, count * BIASES), -1, dtype=torch.int32)
    suppressed = torch.full((count, ENDS), -1, dtype=torch.int32)
    bias[:, :BIASES], suppressed[0] = 0, 0
    rows = torch.randperm(count - 1, generator=generator)[:batch].int() + 1
    positions = (ints[rows.long(), 1] + integer(0, max_len // 2 - 1, batch)).int()
    logits = torch.randn(batch, vocab, generator=generator) * scale
    suppress = torch.zeros(batch, dtype=torch.int32)
    return Case(tokens, ints, floats, bias, suppressed, rows, positions, suppress, logits)


def ask_everything(case: Case, seed: int = 1) -> None:
    """Gives about half of the rows each of bias, penalties and suppression, and some of them temperature 0."""
    generator = torch.Generator().manual_seed(seed)
    vocab, count = case.logits.shape[1], len(case.tokens)

    def number(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    def half() -> Tensor:
        return torch.rand(count, generator=generator) < 0.5

    case.floats[:, 3] = torch.where(half(), number(0.7, 1.6), case.floats[:, 3])
    case.floats[:, 4] = torch.where(half(), number(-1, 1), 0.0)
    case.floats[:, 5] = torch.where(half(), number(-1, 1), 0.0)
    for row in half().nonzero().flatten().tolist():
        used = int(torch.randint(1, BIASES, (), generator=generator))
        ids = torch.randperm(vocab, generator=generator)[:used].int()
        case.bias[0, row * BIASES : row * BIASES + len(ids)] = ids
        values = torch.randn(len(ids), generator=generator) * 4
        case.bias[1, row * BIASES : row * BIASES + len(ids)] = values.view(torch.int32)
    case.suppressed[:] = torch.randint(-1, vocab, case.suppressed.shape, generator=generator).int()
    case.suppress[:] = torch.randint(0, 2, case.suppress.shape, generator=generator).int()
    case.floats[:, 0] = torch.where(half() & half(), 0.0, case.floats[:, 0])


def truncations(case: Case, top_k: list[int], top_p: list[float], min_p: list[float]) -> None:
    """Every row another combination of the lists, in turn."""
    for row in range(len(case.tokens)):
        case.ints[row, 2] = top_k[row % len(top_k)]
        case.floats[row, 1] = top_p[row // 2 % len(top_p)]
        case.floats[row, 2] = min_p[row // 3 % len(min_p)]


@dataclass
class Expected:
    """What the oracle says. All [B, V] but best [B]."""

    scores: Tensor
    """Adjusted logits after the largest is subtracted and the temperature divided by, float32."""
    sums: Tensor
    """Scores and noise."""
    kept: Tensor
    """What truncation leaves; a greedy row keeps its best token."""
    doubtful: Tensor
    """Whether rounding alone may decide if a token is kept."""
    best: Tensor


def expect(case: Case, full: bool = True) -> Expected:
    """As `sampling.sampler.sample`, up to the draw. float32, but the probabilities of top-p are summed in float64."""
    rows = case.sampling_rows(full)
    assert rows.draw is not None
    logits = adjust(case.logits.float(), rows, case.allowed)
    best = logits.argmax(-1)
    greedy = (rows.draw.temperature == 0).unsqueeze(1)
    scores = logits - logits.gather(1, best.unsqueeze(1))
    scores = scores / torch.where(greedy, 1.0, rows.draw.temperature.unsqueeze(1))
    kept = torch.ones_like(scores, dtype=torch.bool)
    doubtful = torch.zeros_like(kept)
    if rows.truncation is not None:
        t = rows.truncation
        truncated = truncate(scores.double(), t.top_k, t.top_p.double(), t.min_p.double())
        kept = (truncated > -torch.inf) | (scores == -torch.inf)
        doubtful = _doubtful(scores, t) | (scores == -torch.inf)
    only = torch.zeros_like(kept).scatter(1, best.unsqueeze(1), True)
    noise = gumbel_noise(rows.draw.seed, rows.draw.choice, rows.draw.position, logits.shape[1])
    return Expected(scores, scores + noise, torch.where(greedy, only, kept), doubtful & ~greedy, best)


def _doubtful(scores: Tensor, t: Truncation) -> Tensor:
    ordered, ids = scores.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    limit = torch.where(t.top_k > 0, t.top_k, scores.shape[1]).unsqueeze(1)
    share = ordered.masked_fill(rank >= limit, -torch.inf).softmax(-1)
    before = share.cumsum(-1) - share
    top_p = t.top_p.double().unsqueeze(1)
    near = ((before - top_p).abs() < NEAR_MASS) & (top_p < 1) & (rank < limit)
    bound = (ordered - t.min_p.log().unsqueeze(1)).abs() < 1e-5
    return torch.zeros_like(near).scatter(1, ids, near | bound)


def check_draw(found: Expected, kept: Tensor, tokens: Tensor, least_sure: float = 0.9) -> None:
    """The tokens are the oracle's, drawn from what was kept; equal wherever two sums are not too close to tell."""
    sums = found.sums.masked_fill(~kept, -torch.inf)
    first = sums.topk(2).values if sums.shape[1] > 1 else sums.expand(-1, 2) - torch.tensor([0.0, 1.0]).to(sums.device)
    sure = first[:, 0] - first[:, 1] > NEAR_TOKEN
    assert sure.float().mean() >= least_sure
    assert torch.equal(tokens.long()[sure], sums.argmax(-1)[sure])


def check_full(case: Case, **sizes: int) -> None:
    """`full` keeps what the oracle keeps, wherever rounding cannot decide, and draws what the oracle draws."""
    found = expect(case)
    quick = run(case.sampler(**sizes), case, "full")
    sampler = case.sampler(**sizes, tries=0)
    tokens = run(sampler, case, "full")
    assert torch.equal(quick, tokens), "drawing before the cutoff is known changed a token"
    kept = kept_by(sampler, case, found)
    greedy = case.floats[case.rows.long(), 0] == 0
    kept = torch.where(greedy.unsqueeze(1), found.kept, kept)
    assert torch.equal(kept | found.doubtful, found.kept | found.doubtful)
    check_draw(found, kept, tokens)


def kept_by(sampler: DeviceSampler, case: Case, found: Expected) -> Tensor:
    """The tokens that the kernels kept, from the cutoff that `full` left behind. [B, V] bool."""
    cutoff = sampler._cutoff[: len(case.rows)].unsqueeze(1)
    bits = torch.where(found.scores == 0, 0.0, found.scores).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(case.logits.shape[1], device=cutoff.device)
    min_p = case.floats[case.rows.long(), 2].unsqueeze(1)
    above = (found.scores >= min_p.log()) | (ids == found.best.unsqueeze(1))
    return ((keys << ID_BITS.value) + (ID_MASK.value - ids) >= cutoff) & above


def run(sampler: DeviceSampler, case: Case, mode: str) -> Tensor:
    """Samples, checks that nothing was written but the tokens, and that the scratch is as it was. Returns [B] int32."""
    before, logits = case.tokens.clone(), case.logits.clone()
    sampled = torch.full_like(case.rows, -7)
    args = (case.logits, case.rows, case.positions, case.suppress, sampled, case.allowed)
    getattr(sampler, mode)(*args)
    before[case.rows.long(), case.positions.long() + 1] = sampled
    assert torch.equal(case.tokens, before)
    assert torch.equal(case.logits.view(torch.uint8), logits.view(torch.uint8))
    for scratch in (sampler._marks, sampler._arrivals, sampler._found):
        assert not scratch.any()
    assert (sampler._winner == -(2**62)).all()
    return sampled
