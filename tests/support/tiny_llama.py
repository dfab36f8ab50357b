"""A small Llama of random weights behind a real engine, and the same arithmetic written down a second time, densely."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.contracts import MaskedRows, StepResult
from tandem.engine_core.engine import Engine
from tandem.engine_core.kernels.reference.sampling import Draw, Truncation
from tandem.engine_core.kv_cache.storage import KVLayout, KVStorage
from tandem.engine_core.layers.linear_choice import torch_build_context
from tandem.engine_core.model_config import ModelConfig
from tandem.engine_core.models.decoder import Decoder
from tandem.engine_core.models.registry import build_model
from tandem.engine_core.page_counts import PageColumns
from tandem.engine_core.plan import StepPlan
from tandem.engine_core.rope_config import RopeConfig
from tandem.engine_core.runtime.device import CpuDevice
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.runtime.slots import StepSlot
from tandem.engine_core.runtime.staging import capacity
from tandem.engine_core.runtime.tables import DeviceTables
from tandem.engine_core.sampling.scorer import TorchScorer
from tandem.engine_core.sampling.torch_sampler import TorchSampler
from tandem.engine_core.scheduler.admission import RowGate
from tandem.engine_core.scheduler.planner import SchedulerLimits
from tandem.engine_core.scheduler.scheduler import Scheduler
from tandem.engine_core.stats import new_stats
from tandem.protocol.codec import pack_ids, unpack_floats, unpack_ids
from tandem.protocol.commands import Hello, Submit
from tandem.protocol.engine_options import Policy
from tandem.protocol.events import Failure, Finished, Limits, ModelFacts
from tandem.protocol.params import SamplingParams
from tandem.protocol.version import PROTOCOL_VERSION
from tests.fakes.clock import FakeClock
from tests.fakes.constraint import FakeAdvancer, FakeCompiler, FakeConstraint, FakeFiller
from tests.fakes.fixed_masks import ReplayingFiller, as_filled
from tests.fakes.mailbox import FakeMailbox
from tests.support.kv_pool import kv_memory
from tests.support.length_check import check_lengths
from tests.support.sure_draws import Sure, sure_draw

CLIENT, EPOCH, VOCAB, MAX_LEN, END = b"c", 3, 96, 64, 1
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    max_positions=MAX_LEN,
    rms_norm_eps=1e-5,
    tie_embeddings=False,
    attention=(LayerAttention(8**-0.5),) * 2,
    ropes=(RopeConfig(8),),
    eos_ids=(END,),
    dtype="float32",
)


def random_model(seed: int = 0, config: ModelConfig = CONFIG) -> Decoder:
    """Weights large enough that tokens depend on each other and logits are apart."""
    model = build_model(config, torch_build_context(torch.device("cpu"), torch.float32))
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(seed)
    for slot in sorted(model.weight_slots(), key=lambda item: item.name):
        if "norm" in slot.name:
            slot.target.uniform_(0.5, 1.5, generator=generator)
        elif not slot.is_optional and "qkv_proj" not in slot.name and "gate_up_proj" not in slot.name:
            slot.target.normal_(0.0, 0.35, generator=generator)
    return model


def dense_logits(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits after every position, in float64: no pages, no batch, no fused weights. [L, vocab]."""
    config = model.config
    weights = {slot.name: slot.target.double() for slot in model.weight_slots()}
    length, half = len(tokens), config.head_dim // 2
    frequency = 1.0 / config.ropes[0].theta ** (torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    hidden_mask = torch.ones(length, length, dtype=torch.bool).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str, count: int, rotate: bool) -> Tensor:
        y = (x @ weights[f"{name}.weight"].T).view(length, count, config.head_dim)
        if rotate:
            a, b = y[..., :half], y[..., half:]
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return y.repeat_interleave(config.heads // count, 1).transpose(0, 1)

    x = weights["model.embed_tokens.weight"][list(tokens)]
    for index in range(config.layers):
        at = f"model.layers.{index}."
        y = norm(x, at + "input_layernorm")
        query = heads(y, at + "self_attn.q_proj", config.heads, True)
        key = heads(y, at + "self_attn.k_proj", config.kv_heads, True)
        value = heads(y, at + "self_attn.v_proj", config.kv_heads, False)
        scores = (query @ key.transpose(1, 2) / config.head_dim**0.5).masked_fill(hidden_mask, -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(length, -1)
        x = x + mixed @ weights[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm")
        gate, up = (y @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def scores(
    logits: Tensor, known: Sequence[int], prompt_len: int, params: SamplingParams, constraint: FakeConstraint | None
) -> Tensor:
    """What the token after `known` is drawn by, rule by rule for one row: logits, or scores if it is random."""
    row = logits.float().clone()
    biases = unpack_floats(params.logit_bias_values)
    for token, bias in zip(unpack_ids(params.logit_bias_ids), biases, strict=True):
        row[token] += bias
    output = list(known[prompt_len:])
    for token in set(known):
        row[token] = (
            row[token] / params.repetition_penalty if row[token] > 0 else row[token] * params.repetition_penalty
        )
    for token in set(output):
        row[token] -= params.presence_penalty + output.count(token) * params.frequency_penalty
    if len(output) < params.min_tokens:
        row[unpack_ids(params.stop_token_ids) + ([] if params.ignore_eos else [END])] = -torch.inf
    if constraint is not None:
        row[[token for token in range(VOCAB) if not (token < 40 and constraint.allows(token))]] = -torch.inf
    if params.greedy:
        return row
    return (row - row.max()) / params.temperature


def choose(row: Tensor, params: SamplingParams, position: int, gap: float) -> Sure:
    """The token that comes of `scores`, sure if sums more than `gap` apart decide."""
    if params.greedy:
        best = row.topk(2)
        return Sure(int(best.indices[0]), 0, bool(best.values[0] - best.values[1] > gap))
    given = (params.temperature, params.seed, params.choice, position)
    limits = (params.top_k, params.top_p, params.min_p)
    draw, truncation = Draw(*map(one, given)), Truncation(*map(one, limits))
    return sure_draw(row, draw, truncation if params.truncates else None, near=gap)


def one(value: float) -> Tensor:
    return torch.tensor([value])


@dataclass
class Compared:
    """How many tokens were looked at, and how many were too close to call."""

    tokens: int = 0
    close: int = 0
    gap: float = 1e-4

    def check(
        self, model: Decoder, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, constrained: bool
    ) -> None:
        """Asserts that each token is what the dense model chooses after those before it."""
        logits = dense_logits(model, [*prompt, *tokens])
        constraint = FakeConstraint("parity") if constrained else None
        for index, token in enumerate(tokens):
            known = [*prompt, *tokens[:index]]
            row = scores(logits[len(known) - 1], known, len(prompt), params, constraint)
            found = choose(row, params, len(known), self.gap)
            self.tokens += 1
            if not found.sure:
                self.close += 1
            else:
                assert token == found.token, f"token {index} of {tokens} after {prompt}, {params}: {found}"
            assert constraint is None or constraint.accept(token)


class RecordingTorchRuntime(TorchRuntime):
    """Keeps every plan with its masks, logits and tokens, in the order of launches."""

    def record(self) -> None:
        self.plans: list[StepPlan] = []
        self.masks: list[MaskedRows | None] = []
        self.logits: list[Tensor] = []
        self.results: list[StepResult] = []

    def launch(self, slot: int, plan: StepPlan) -> None:
        super().launch(slot, plan)
        logits = self.slots[slot].logits
        assert logits is not None
        self.plans.append(plan)
        self.logits.append(logits.clone())

    def sample(self, slot: int, masks: MaskedRows | None) -> None:
        super().sample(slot, masks)
        self.masks.append(as_filled(self.slots[slot], masks))

    def collect(self, slot: int) -> StepResult:
        self.results.append(super().collect(slot))
        return self.results[-1]


@dataclass
class Shape:
    """How an engine is cut."""

    depth: int = 2
    page_size: int = 4
    max_rows: int = 4
    step_tokens: int = 32
    chunk: int = 32
    pages: int = 0
    cache: bool = True
    policy: Policy = "fcfs"
    static: bool = False


def build_runtime(model: Decoder, shape: Shape) -> RecordingTorchRuntime:
    pages = shape.pages or shape.max_rows * -(-MAX_LEN // shape.page_size) + 1
    device = CpuDevice()
    layout = KVLayout.of_one_group(
        CONFIG.layers,
        page_size=shape.page_size,
        kv_heads=CONFIG.kv_heads,
        head_dim=CONFIG.head_dim,
        dtype=torch.float32,
    )
    kv = KVStorage.allocate(layout, pages, "cpu")
    tables = DeviceTables.allocate(
        shape.max_rows, MAX_LEN, (PageColumns(0, -(-MAX_LEN // shape.page_size)),), device.torch_device
    )
    words = capacity(shape.max_rows, shape.step_tokens, shape.max_rows * -(-MAX_LEN // shape.page_size), 1024)
    attention, filler = TorchPlanner(CONFIG.attention_kinds), ReplayingFiller(FakeFiller())
    slots = [
        StepSlot.allocate(device, words, shape.max_rows, shape.step_tokens, VOCAB, attention, filler)
        for _ in range(shape.depth)
    ]
    sampler, scorer = TorchSampler(tables.sampling), TorchScorer()
    runtime = RecordingTorchRuntime(device, model, kv, tables, sampler, scorer, filler, slots, tables.page_tables(kv))
    runtime.record()
    return runtime


class TinyEngine:
    """Scheduler, pipeline, control and TorchRuntime as in production, over a mailbox that is a list."""

    def __init__(self, model: Decoder, shape: Shape) -> None:
        self.model = model
        self.runtime = build_runtime(model, shape)
        self.mailbox = FakeMailbox()
        memory = kv_memory(self.runtime.kv.pages, shape.page_size, shape.cache)
        limits = SchedulerLimits(shape.step_tokens, shape.chunk, 100, static=shape.static)
        self.scheduler = Scheduler(RowGate(shape.max_rows), memory, limits, shape.policy)
        stats, clock = new_stats(), FakeClock()
        facts = ModelFacts("tiny", VOCAB, MAX_LEN, [END], "", "cpu", "float32", 0)
        compiler = FakeCompiler()
        self.engine = Engine.assemble(
            self.scheduler,
            self.runtime,
            self.mailbox,
            compiler,
            depth=shape.depth,
            epoch=EPOCH,
            model=facts,
            limits=Limits(0, 0, 0, 0, 0),
            stats=stats,
            clock=clock,
            stage_clock=clock,
            advancer=FakeAdvancer(is_remote=True),
        )
        self.control = self.engine.control
        self.mailbox.inbox.append((CLIENT, Hello(PROTOCOL_VERSION, EPOCH, "test")))
        self.requests = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], constrained: Sequence[int] = ()
    ) -> list[list[int]]:
        """All requests at once; each one's tokens. `constrained`: those whose even and odd ids take turns."""
        first, self.requests = self.requests, self.requests + len(prompts)
        for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            grammar = "parity" if index in constrained else None
            self.mailbox.inbox.append((CLIENT, Submit(first + index, pack_ids(prompt), wanted, grammar)))
        for _ in range(2000):
            if len(self.mailbox.outcomes) == self.requests:
                break
            self.engine.tick()
            check_lengths(self.engine)
        keys = [(CLIENT, first + index) for index in range(len(prompts))]
        for key in keys:
            (outcome,) = self.mailbox.outcomes[key]
            assert isinstance(outcome, Finished), outcome
            assert not isinstance(outcome, Failure)
        while self.engine.pipeline.in_flight:
            self.engine.tick()
        return [self.mailbox.received[key] for key in keys]
