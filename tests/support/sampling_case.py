"""Random rows for the sampling kernels, and the torch oracle's results for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.philox import gumbel_noise
from tandem.engine_core.kernels.reference.sampling import SamplingRows, Truncation, adjust_logits, sample, truncate
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.rank import ID_BITS, ID_MASK
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.sampling.sampler import BIASED, PENALIZES, RANDOM, SUPPRESSES, TRUNCATES, Mode
from tandem.engine_core.sampling.torch_sampler import TorchSampler
from tandem.engine_core.sampling.triton_sampler import CAPACITY, GROUP, TILE, TRIES, TritonSampler

PROMPT_LEN, MIN_TOKENS, CHOICE, SEED, TOP_K = (
    INT_COLUMNS.index(name) for name in ("prompt_len", "min_tokens", "choice", "seed", "top_k")
)
TEMPERATURE, TOP_P, MIN_P = (FLOAT_COLUMNS.index(name) for name in ("temperature", "top_p", "min_p"))
REPETITION, PRESENCE, FREQUENCY = (
    FLOAT_COLUMNS.index(f"{name}_penalty") for name in ("repetition", "presence", "frequency")
)
EVERYTHING = RANDOM | TRUNCATES | PENALIZES | BIASED | SUPPRESSES
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
    lengths: Tensor
    rows: Tensor
    positions: Tensor
    logits: Tensor
    allowed: Tensor | None = None

    @property
    def tables(self) -> SamplingTables:
        return SamplingTables(self.tokens, self.ints, self.floats, self.bias, self.suppressed, self.lengths)

    def sampler(
        self, tile: int = TILE, group: int = GROUP, capacity: int = CAPACITY, tries: int = TRIES
    ) -> TritonSampler:
        vocab, batch, device = self.logits.shape[1], len(self.rows), self.logits.device
        pdl = device.type == "cuda" and read_gpu_traits().pdl
        scratch = SamplingScratch.allocate(vocab, batch, tile, group, capacity, device, pdl)
        return TritonSampler(self.tables, scratch, tries)

    def batch(self, sampled: Tensor, needs: int = 0, allowed: Tensor | None = None) -> SamplingBatch:
        """Make the batch of the step; its history is as long as the token table."""
        longest = self.tokens.shape[1]
        return SamplingBatch(self.logits, self.rows, self.positions, sampled, allowed, needs, longest)

    def sampling_rows(self, full: bool) -> SamplingRows:
        """Gather the oracle's parameters: all of them, or those of draws from the whole softmax."""
        batch = self.batch(torch.zeros_like(self.rows), EVERYTHING if full else RANDOM)
        return TorchSampler(self.tables).gather(batch)

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
    ints = torch.zeros(count, len(INT_COLUMNS), dtype=torch.int64)
    ints[:, PROMPT_LEN] = integer(1, max_len // 2, count)
    ints[:, CHOICE] = integer(0, 5, count)
    ints[:, SEED] = integer(0, 2**63 - 1, count)
    floats = torch.zeros(count, len(FLOAT_COLUMNS))
    floats[:, TEMPERATURE] = torch.rand(count, generator=generator) + 0.3
    floats[:, TOP_P] = 1
    floats[:, REPETITION] = 1
    ints[0], floats[0], tokens[0] = 0, 0, 0
    bias = torch.full((2, count, BIASES), -1, dtype=torch.int32)
    suppressed = torch.full((count, ENDS), -1, dtype=torch.int32)
    bias[:, 0], suppressed[0] = 0, 0
    rows = torch.randperm(count - 1, generator=generator)[:batch].int() + 1
    positions = (ints[rows.long(), PROMPT_LEN] + integer(0, max_len // 2 - 1, batch)).int()
    logits = torch.randn(batch, vocab, generator=generator) * scale
    lengths = torch.ones(count, dtype=torch.int32)
    return Case(tokens, ints, floats, bias, suppressed, lengths, rows, positions, logits)


def ask_everything(case: Case, seed: int = 1) -> None:
    """Gives about half of the rows each of bias, penalties and suppression, and some of them temperature 0."""
    generator = torch.Generator().manual_seed(seed)
    vocab, count = case.logits.shape[1], len(case.tokens)

    def number(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    def half() -> Tensor:
        return torch.rand(count, generator=generator) < 0.5

    repetition = case.floats[:, REPETITION]
    case.floats[:, REPETITION] = torch.where(half(), number(0.7, 1.6), repetition)
    case.floats[:, PRESENCE] = torch.where(half(), number(-1, 1), 0.0)
    case.floats[:, FREQUENCY] = torch.where(half(), number(-1, 1), 0.0)
    for row in half().nonzero().flatten().tolist():
        used = int(torch.randint(1, BIASES, (), generator=generator))
        ids = torch.randperm(vocab, generator=generator)[:used].int()
        case.bias[0, row, : len(ids)] = ids
        values = torch.randn(len(ids), generator=generator) * 4
        case.bias[1, row, : len(ids)] = values.view(torch.int32)
    case.suppressed[:] = torch.randint(-1, vocab, case.suppressed.shape, generator=generator).int()
    longest = int((case.positions.long() + 2 - case.ints[case.rows.long(), PROMPT_LEN]).max())
    case.ints[1:, MIN_TOKENS] = torch.randint(0, longest, (count - 1,), generator=generator)
    temperature = case.floats[:, TEMPERATURE]
    case.floats[:, TEMPERATURE] = torch.where(half() & half(), 0.0, temperature)


def truncations(case: Case, top_k: list[int], top_p: list[float], min_p: list[float]) -> None:
    """Give every row another combination of the lists, in turn."""
    for row in range(len(case.tokens)):
        case.ints[row, TOP_K] = top_k[row % len(top_k)]
        case.floats[row, TOP_P] = top_p[row // 2 % len(top_p)]
        case.floats[row, MIN_P] = min_p[row // 3 % len(min_p)]


@dataclass
class Expected:
    """Results of the oracle, [B, V] each but for `best`."""

    scores: Tensor
    """Adjusted logits after the largest is subtracted and the temperature divided by, float32."""
    sums: Tensor
    """Scores and noise."""
    kept: Tensor
    """True for tokens that truncation leaves; a greedy row keeps its best token."""
    doubtful: Tensor
    """True where rounding alone may decide if a token is kept."""
    best: Tensor
    """[B], id of the largest adjusted logit."""


def expect(case: Case, full: bool = True) -> Expected:
    """Compute what the oracle computes before its draw, in float32, with the probabilities of top-p in float64."""
    rows = case.sampling_rows(full)
    assert rows.draw is not None
    logits = adjust_logits(case.logits.float(), rows, case.allowed)
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


def expect_tokens(case: Case, mode: Mode) -> Tensor:
    """Return the oracle's tokens, [B] int64."""
    rows = case.sampling_rows(mode is Mode.FULL)
    return sample(case.logits, SamplingRows() if mode is Mode.GREEDY else rows, case.allowed)


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
    """Assert that the tokens are the oracle's draw from what was kept, wherever two sums are not too close to tell."""
    sums = found.sums.masked_fill(~kept, -torch.inf)
    first = sums.topk(2).values if sums.shape[1] > 1 else sums.expand(-1, 2) - torch.tensor([0.0, 1.0]).to(sums.device)
    sure = first[:, 0] - first[:, 1] > NEAR_TOKEN
    assert sure.float().mean() >= least_sure
    assert torch.equal(tokens.long()[sure], sums.argmax(-1)[sure])


def check_full(case: Case, **sizes: int) -> None:
    """Assert that the full mode keeps what the oracle keeps, where rounding cannot decide, and draws what it draws."""
    found = expect(case)
    quick = run(case.sampler(**sizes), case, Mode.FULL)
    sampler = case.sampler(**sizes, tries=0)
    tokens = run(sampler, case, Mode.FULL)
    assert torch.equal(quick, tokens), "drawing before the cutoff is known changed a token"
    kept = kept_by(sampler, case, found)
    greedy = case.floats[case.rows.long(), TEMPERATURE] == 0
    kept = torch.where(greedy.unsqueeze(1), found.kept, kept)
    assert torch.equal(kept | found.doubtful, found.kept | found.doubtful)
    check_draw(found, kept, tokens)


def kept_by(sampler: TritonSampler, case: Case, found: Expected) -> Tensor:
    """Return the tokens that the kernels kept, by the cutoff that they left behind. [B, V] bool."""
    cutoff = sampler.scratch.cutoff[: len(case.rows)].unsqueeze(1)
    bits = torch.where(found.scores == 0, 0.0, found.scores).view(torch.int32)
    keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()
    ids = torch.arange(case.logits.shape[1], device=cutoff.device)
    min_p = case.floats[case.rows.long(), MIN_P].unsqueeze(1)
    above = (found.scores >= min_p.log()) | (ids == found.best.unsqueeze(1))
    return ((keys << ID_BITS.value) + (ID_MASK.value - ids) >= cutoff) & above


def run(sampler: TritonSampler, case: Case, mode: Mode) -> Tensor:
    """Sample, the full mode under the case's masks if it has some. Returns [B] int32.

    Asserts that nothing was written but the tokens, and that the scratch is as it was.
    """
    before, lengths, logits = case.tokens.clone(), case.lengths.clone(), case.logits.clone()
    sampled = torch.full_like(case.rows, -7)
    if mode is Mode.FULL and case.allowed is not None:
        sampler.launch(Mode.MASKED, case.batch(sampled, allowed=case.allowed))
    else:
        sampler.launch(mode, case.batch(sampled))
    before[case.rows.long(), case.positions.long() + 1] = sampled.clamp(min=0)
    lengths[case.rows.long()] = torch.where(case.rows > 0, case.positions + 2, 1)
    assert torch.equal(case.tokens, before) and torch.equal(case.lengths, lengths)
    assert torch.equal(case.logits.view(torch.uint8), logits.view(torch.uint8))
    for buffer in (sampler.scratch.marks, sampler.scratch.arrivals, sampler.scratch.found):
        assert not buffer.any()
    assert (sampler.scratch.winner == NOTHING.value).all()
    return sampled
