"""Random rows for the sampling kernels, and the torch oracle's results for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.kernels.reference.sampling import SEGMENT, SamplingRows, adjust_logits, sample
from tandem.engine_core.kernels.sampling.inputs import FLOAT_COLUMNS, INT_COLUMNS, SamplingBatch, SamplingTables
from tandem.engine_core.kernels.sampling.scratch import NOTHING, SamplingScratch
from tandem.engine_core.runtime.device import read_gpu_traits
from tandem.engine_core.sampling.sampler import BIASED, PENALIZES, RANDOM, SUPPRESSES, TRUNCATES, Mode
from tandem.engine_core.sampling.torch_sampler import gather
from tandem.engine_core.sampling.triton_sampler import CAPACITY, GROUP, TILE, TritonSampler
from tests.support.sure_draws import Sure, sure_draw

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
        self, tile: int = TILE, segment: int = SEGMENT, group: int = GROUP, capacity: int = CAPACITY
    ) -> TritonSampler:
        vocab, batch, device = self.logits.shape[1], len(self.rows), self.logits.device
        pdl = device.type == "cuda" and read_gpu_traits().pdl
        scratch = SamplingScratch.allocate(vocab, batch, tile, segment, group, capacity, device, pdl)
        return TritonSampler(self.tables, scratch)

    def batch(self, sampled: Tensor, needs: int = 0, allowed: Tensor | None = None) -> SamplingBatch:
        """Make the batch of the step; its history is as long as the token table."""
        longest = self.tokens.shape[1]
        return SamplingBatch(self.logits, self.rows, self.positions, sampled, allowed, needs, longest)

    def sampling_rows(self, full: bool) -> SamplingRows:
        """Gather the oracle's parameters: all of them, or those of draws from the whole softmax."""
        batch = self.batch(torch.zeros_like(self.rows), EVERYTHING if full else RANDOM)
        return gather(self.tables, batch)

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


def expect(case: Case, full: bool = True, segment: int = SEGMENT) -> list[Sure]:
    """Draw what the oracle draws, one row after the other. The adjusted logits are float32, all else is float64."""
    rows = case.sampling_rows(full)
    assert rows.draw is not None
    logits = adjust_logits(case.logits.float(), rows, case.allowed)
    best = logits.argmax(-1)
    found = []
    for index, only in enumerate(torch.arange(len(logits), device=logits.device).split(1)):
        draw, truncation = rows.draw.of(only), rows.truncation
        top = logits[index, best[index]]
        if draw.temperature == 0 or not case.logits[index].amax().isfinite() or top == -torch.inf:
            found.append(Sure(int(best[index]) if case.logits[index].amax().isfinite() else -1, 0, True))
            continue
        scores = (logits[index] - top) / draw.temperature
        found.append(sure_draw(scores, draw, None if truncation is None else truncation.of(only), segment))
    return found


def expect_tokens(case: Case, mode: Mode, segment: int = SEGMENT) -> Tensor:
    """Return the oracle's tokens, [B] int64."""
    rows = case.sampling_rows(mode is Mode.FULL)
    return sample(case.logits, SamplingRows() if mode is Mode.GREEDY else rows, case.allowed, segment)


def check_draw(case: Case, mode: Mode, tokens: Tensor, segment: int = SEGMENT, least_sure: float = 0.9) -> list[int]:
    """Assert that the tokens are the oracle's, where rounding cannot decide. Returns the draws that each row took."""
    found = expect(case, mode is Mode.FULL, segment)
    oracle = expect_tokens(case, mode, segment).tolist()
    sure = [index for index, row in enumerate(found) if row.sure]
    assert len(sure) >= least_sure * len(found)
    wanted = {index: found[index].token for index in sure}
    assert {index: oracle[index] for index in sure} == wanted
    assert {index: tokens[index].item() for index in sure} == wanted
    return [row.draws for row in found]


def check_full(case: Case, seeds: int = 1, **sizes: int) -> list[int]:
    """Assert that the full mode draws what the oracle draws, for some seeds. Returns the draws that each row took."""
    draws = []
    for turn in range(seeds):
        case.ints[1:, SEED] += turn
        tokens = run(case.sampler(**sizes), case, Mode.FULL, restore=True)
        draws += check_draw(case, Mode.FULL, tokens, sizes.get("segment", SEGMENT))
    return draws


def run(sampler: TritonSampler, case: Case, mode: Mode, restore: bool = False) -> Tensor:
    """Sample, the full mode under the case's masks if it has some. Returns [B] int32.

    Asserts that nothing was written but the tokens, and that the scratch is as it was. restore: takes the tokens out of
    the table again, so that the oracle sees the same history.
    """
    tokens = case.tokens.clone()
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
    for buffer in (sampler.scratch.marks, sampler.scratch.arrivals):
        assert not buffer.any()
    assert (sampler.scratch.winner == NOTHING.value).all()
    if restore:
        case.tokens.copy_(tokens)
    return sampled
