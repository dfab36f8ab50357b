"""Teacher-forced logits: out of transformers, and out of a runtime that takes sequences in steps of every sort."""

import random
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.engine_core.plan import NewSequence, ScheduledSequence, StepPlan
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.protocol.codec import pack_ids
from tandem.protocol.params import SamplingParams

VOCAB = 1024
LONGEST_CHUNK = 24
GREEDY = SamplingParams(10**6, temperature=0.0)


def save_random(directory: Path, head_dim: int, heads: int, kv_heads: int, seed: int) -> None:
    """A small Llama of random weights."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, head_dim=head_dim,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=512,
        rms_norm_eps=1e-5, initializer_range=0.03, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_config(directory, config, seed)


def save_config(
    directory: Path, config: Any, seed: int, norms: tuple[float, float] = (0.5, 1.5), device: str = "cpu"
) -> None:
    """A model of random weights, as transformers writes one, in bfloat16: the same numbers whoever reads them.

    config: one of transformers' configurations; norms: range of the norms' weights; device: where they are drawn, for
    large ones.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad(), torch.device(device):
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(*norms)
            elif "embed" in name:
                parameter.normal_(0, 0.7)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
        model.to(torch.bfloat16).save_pretrained(directory)


def reference_logits(directory: Path, sequences: list[list[int]], device: str) -> list[Tensor]:
    """transformers in float32: logits after every position, [L, V] each."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        model = model.to(device).eval()
        return [model(torch.tensor([ids], device=device)).logits[0] for ids in sequences]


def random_sequences(count: int, longest: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(longest // 2, longest))] for _ in range(count)]


@dataclass
class Forced:
    """Sequences on their way through a runtime that never samples; row and id of sequence i are i + 1."""

    runtime: TorchRuntime
    sequences: list[list[int]]
    found: dict[str, list[tuple[int, int, Tensor]]] = field(default_factory=dict)
    """By sort of step: sequence, position, logits after it."""
    steps: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.sequences)
        self.mapped = [False] * len(self.sequences)
        tokens = self.runtime.tables.tokens
        with torch.inference_mode():
            for index, ids in enumerate(self.sequences):
                tokens[index + 1, : len(ids)] = torch.tensor(ids, dtype=torch.int32, device=tokens.device)

    def run(self, seed: int) -> None:
        """Steps of prompt chunks, of chunks beside single tokens, and of single tokens alone, to everybody's end."""
        rng = random.Random(seed)
        step_id = 0
        while any(self.left(index) for index in range(len(self.sequences))):
            step_id += 1
            sort = rng.choices(["chunks", "mixed", "decode"], [2, 3, 12])[0]
            takes = [self.take(index, sort, rng) for index in range(len(self.sequences))]
            if any(takes):
                self.step(step_id, takes)

    def left(self, index: int) -> int:
        return len(self.sequences[index]) - self.done[index]

    def take(self, index: int, sort: str, rng: random.Random) -> int:
        """How many positions a row computes now; a row that has not begun needs a step that brings its pages."""
        if rng.random() < 0.2 or (sort == "decode" and not self.mapped[index]):
            return 0
        several = sort == "chunks" or (sort == "mixed" and rng.random() < 0.4)
        return min(self.left(index), rng.randint(2, LONGEST_CHUNK) if several else 1)

    def step(self, step_id: int, takes: list[int]) -> None:
        rows = tuple(self.row(index, take) for index, take in enumerate(takes) if take)
        admitted = tuple(NewSequence(row.seq_id, row.row, 1, GREEDY) for row in rows if row.start == 0)
        lengths = self.runtime.tables.sampling.lengths
        with torch.inference_mode():
            for row in rows:  # What sampling would have left.
                lengths[row.row] = row.end
        self.runtime.launch(step_id % len(self.runtime.slots), StepPlan.of(step_id, rows, admitted))
        slot = self.runtime.slots[step_id % len(self.runtime.slots)]
        assert slot.logits is not None
        # A copy: a graph's logits stay where they are, and the next replay overwrites them.
        logits = slot.logits[: len(rows)].to(torch.float32, copy=True)
        sort = "decode from graphs" if slot.graphs is not None else self.sort(rows)
        self.runtime.synchronize()
        # Nothing was sampled, so nothing is to be collected: the next step may have the slot.
        slot.plan = slot.packed = slot.logits = None
        self.steps[sort] += 1
        for row, after in zip(rows, logits, strict=True):
            self.found.setdefault(sort, []).append((row.seq_id - 1, row.end - 1, after))
            self.done[row.seq_id - 1] = row.end

    def row(self, index: int, take: int) -> ScheduledSequence:
        start, ids = self.done[index], self.sequences[index]
        pages = () if self.mapped[index] else self.pages(index)
        self.mapped[index] = True
        # As the scheduler has it: whoever computes several positions brings their tokens.
        tokens = pack_ids(ids[start : start + take]) if take > 1 or pages else b""
        return ScheduledSequence(index + 1, index + 1, start, take, True, tokens=tokens, new_pages=pages)

    def pages(self, index: int) -> tuple[int, ...]:
        """Pages of all positions of a row, for each KV group."""
        columns, rows = self.runtime.tables.columns, len(self.sequences)
        assert not any(own.ring for own in columns), "tables of short sequences have a column for each page"
        groups, width = range(len(columns)), range(columns[0].count)
        ids = [1 + index + rows * (group + len(columns) * page) for group in groups for page in width]
        assert max(ids) < self.runtime.kv.pages
        return tuple(ids)

    @staticmethod
    def sort(rows: tuple[ScheduledSequence, ...]) -> str:
        single = sum(row.length == 1 for row in rows)
        if single == len(rows):
            return "decode without graphs"
        return "mixed" if single else "chunks"


@dataclass
class Agreement:
    """How far two sets of logits are apart, and whether they choose alike."""

    error: float
    scale: float
    """Standard deviation of the reference's logits."""
    compared: int
    excluded: int
    different: int
    """Positions compared that choose another token."""

    @classmethod
    def of(cls, mine: Tensor, reference: Tensor) -> "Agreement":
        """[N, V] each. Positions whose top two are nearer than twice the error are left out."""
        error = (mine - reference).abs().max().item()
        top = reference.topk(2, dim=-1)
        clear = top.values[:, 0] - top.values[:, 1] > 2 * error
        other = (mine.argmax(-1) != top.indices[:, 0]) & clear
        compared = int(clear.sum())
        return cls(error, reference.std().item(), compared, len(mine) - compared, int(other.sum()))

    def __str__(self) -> str:
        return (
            f"max logit error {self.error:.2e} (logits' deviation {self.scale:.2f}); {self.compared} positions "
            f"compared, {self.excluded} excluded, {self.different} different"
        )
