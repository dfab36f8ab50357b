"""Two layers of each family's shape, on CUDA against transformers in float32.

Widths, heads and activations are those of a published model; the vocabulary is small, and windows are shorter than the
sequences. All kinds of steps must agree: prompts and chunks, chunks mixed with decode rows, and decode from graphs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.porting.tiny import norm_range
from tandem.engine_core.attention.triton import RaggedGraphPlanner
from tandem.engine_core.models.registry import FAMILIES, read_config
from tandem.engine_core.startup import attention as startup_attention
from tandem.protocol.engine_options import Dtype
from tests.gpu.test_backends import DEVICE, LONGEST, ROWS, Checkpoint, build, check
from tests.support.flashinfer_kernels import graph_planner, missing_kernel
from tests.support.teacher_forcing import VOCAB, random_sequences, reference_logits, save_config

pytestmark = pytest.mark.gpu

WINDOW = 48
"""Positions of the windows, of sequences of 80 to 160."""
CAP = 150.0
"""Soft cap of the logits. Those of random weights reach hundreds, where Gemma's 30 would make the largest equal."""
BOUNDS: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest error of a logit over the standard deviation of logits. In bfloat16 on a CPU it is 0.06."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Shape:
    """The shape of a published model."""

    config: str
    """Name of its configuration in transformers."""
    fields: dict[str, Any]
    norms: tuple[float, float] = (0.5, 1.5)
    """Range of the norms' weights as a checkpoint stores them."""


def shape(config: str, hidden: int, inner: int, heads: int, kv_heads: int, **fields: Any) -> Shape:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "initializer_range": 1.2 * hidden**-0.5,
    }
    return Shape(config, COMMON | sizes | fields, norm_range(config))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 48,
    "long_factor": [1.0 + 0.5 * pair for pair in range(48)],
}
"""Every sequence is longer than the 64 positions below, so transformers takes the long factors for all."""
LOCAL_AND_GLOBAL = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
SHAPES = {
    "gemma-2-2b": shape("Gemma2Config", 2304, 9216, 8, 4, sliding_window=WINDOW, final_logit_softcapping=CAP),
    "gemma-2-27b": shape(
        *("Gemma2Config", 4608, 36864, 32, 16),
        head_dim=128,
        query_pre_attn_scalar=144,
        sliding_window=WINDOW,
        final_logit_softcapping=CAP,
    ),
    "gemma-3-1b": shape("Gemma3TextConfig", 1152, 6912, 4, 1, **LOCAL_AND_GLOBAL),
    "gemma-3-4b": shape("Gemma3TextConfig", 2560, 10240, 8, 4, **LOCAL_AND_GLOBAL),
    "llama-3.2-1b": shape(
        "LlamaConfig", 2048, 8192, 32, 8, head_dim=64, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "llama-2-7b": shape("LlamaConfig", 4096, 11008, 32, 32),
    "mistral-7b-v0.1": shape("MistralConfig", 4096, 14336, 32, 8, sliding_window=WINDOW),
    "mistral-7b-v0.3": shape("MistralConfig", 4096, 14336, 32, 8, sliding_window=None),
    "mistral-nemo": shape("MistralConfig", 5120, 14336, 32, 8, head_dim=128, sliding_window=None),
    "ministral-3-3b": shape("Ministral3Config", 3072, 9216, 32, 8, head_dim=128, tie_word_embeddings=True),
    "phi-3-mini-4k": shape("Phi3Config", 3072, 8192, 32, 32, sliding_window=WINDOW),
    "phi-4": shape("Phi3Config", 5120, 17920, 40, 10, rope_parameters={"rope_type": "default", "rope_theta": 250000.0}),
    "phi-4-mini": shape(
        *("Phi3Config", 3072, 8192, 24, 8),
        rope_parameters=LONGROPE,
        original_max_position_embeddings=64,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": shape("Qwen2Config", 896, 4864, 14, 2, tie_word_embeddings=True),
    "qwen2.5-7b": shape("Qwen2Config", 3584, 18944, 28, 4),
    "qwen2-windowed": shape(
        "Qwen2Config", 3584, 18944, 28, 4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "olmo-2-1b": shape("Olmo2Config", 2048, 8192, 16, 16),
    "olmoe-1b-7b": shape("OlmoeConfig", 2048, 1024, 16, 16, num_experts=32, num_experts_per_tok=8, clip_qkv=8.0),
    "mixtral": shape("MixtralConfig", 1024, 3584, 16, 8, num_local_experts=8, num_experts_per_tok=2),
    "qwen3-30b-a3b": shape(
        *("Qwen3MoeConfig", 2048, 6144, 32, 4),
        head_dim=128,
        num_experts=32,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "qwen3.5-9b": shape(
        *("Qwen3_5TextConfig", 4096, 12288, 16, 4), head_dim=256, layer_types=["linear_attention", "full_attention"]
    ),
    "qwen3.6-35b-a3b": shape(
        *("Qwen3_5MoeTextConfig", 2048, 512, 16, 2),
        head_dim=256,
        layer_types=["linear_attention", "full_attention"],
        num_experts=32,
    ),
    "qwen3-next-80b-a3b": shape(
        *("Qwen3NextConfig", 2048, 5120, 16, 2),
        head_dim=256,
        layer_types=["linear_attention", "full_attention"],
        num_experts=48,
        num_experts_per_tok=10,
    ),
    "qwen3-4b": shape("Qwen3Config", 2560, 9728, 32, 8, head_dim=128, tie_word_embeddings=True),
}


class FamilyCheckpoint(Checkpoint):
    """A random model of a family's shape, two sets of sequences, and transformers' logits for them."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        import transformers

        save_config(
            directory, getattr(transformers, shape.config)(**shape.fields), seed=1, norms=shape.norms, device=DEVICE
        )
        self.directory = directory
        self.sequences = [random_sequences(ROWS, LONGEST, seed) for seed in (1, 2)]
        reference = reference_logits(directory, [*self.sequences[0], *self.sequences[1]], DEVICE)
        self.reference = [reference[:ROWS], reference[ROWS:]]
        self.deviation = float(torch.cat(self.reference[0]).std())


@pytest.fixture(scope="module", params=list(SHAPES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyCheckpoint:
    return FamilyCheckpoint(tmp_path_factory.mktemp("family"), SHAPES[request.param])


@pytest.mark.parametrize(
    ("dtype", "few"), [("float32", 256), ("bfloat16", 256), ("bfloat16", 0)], ids=["fp32", "bf16", "bf16-flashinfer"]
)
def test_a_familys_shape_agrees_with_transformers(
    checkpoint: FamilyCheckpoint, dtype: Dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of graphs run in Triton up to `few` tokens and in FlashInfer beyond."""
    config = read_config(checkpoint.directory)
    heads = (config.heads, config.kv_heads, config.head_dim)
    if few == 0 and (missing := missing_kernel(*heads, torch.bfloat16, config.attention_kinds)):
        pytest.skip(missing)
    monkeypatch.setattr(startup_attention, "FEW_TOKENS", few)
    runtime = build(checkpoint, dtype)
    assert runtime.graphs is not None
    kernels = {type(mixed.prompts) for slot in runtime.graphs.mixed for mixed in slot.values()}
    assert kernels == {RaggedGraphPlanner if few else graph_planner()}
    label = f"{runtime.model.config.architecture}, {dtype}, {' and '.join(kind.__name__ for kind in kernels)}"
    check(runtime, checkpoint, label, BOUNDS[dtype] * checkpoint.deviation)


def test_every_family_has_a_shape_here() -> None:
    covered = {shape.config.removesuffix("Config").removesuffix("Text") for shape in SHAPES.values()}
    assert covered == {name.removesuffix("ForCausalLM") for name in FAMILIES}
