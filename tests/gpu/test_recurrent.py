"""Recurrent layers on a GPU: kernels against their oracle, and engines with a hybrid model."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.kernels.delta_rule.state import DeltaRuleShape
from tandem.engine_core.kernels.kernel_set import torch_kernels, triton_kernels
from tandem.engine_core.kernels.reference.delta_rule import fold
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.params import SamplingParams
from tests.engine_core.models.test_qwen3_5 import save_random
from tests.support.delta_rule_case import STEPS, DeltaRuleCase
from tests.support.engine_driver import DrivenEngine
from tests.support.parity import VOCAB, greedy_tokens, random_tokens
from tests.support.plan_recording import runtime_of

pytestmark = pytest.mark.gpu

SHAPE_9B = DeltaRuleShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
BOUNDS = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4}
"""Largest error over the largest value."""
LENGTHS, TOKENS = (1, 2, 3, 70, 16, 33, 5, 64), 20


@pytest.mark.parametrize(
    ("dtype", "pdl"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True), (torch.float32, True)],
)
def test_steps_equal_the_oracle(dtype: torch.dtype, pdl: bool) -> None:
    """The oracle runs on the CPU with the same inputs."""
    found = DeltaRuleCase(triton_kernels(pdl), [200] * 5, SHAPE_9B, device="cuda", dtype=dtype)
    expected = DeltaRuleCase(torch_kernels(), [200] * 5, SHAPE_9B, dtype=dtype)
    ends: dict[int, int] = {}
    with torch.cuda.stream(torch.cuda.Stream()), torch.inference_mode():
        for work, num_single in STEPS:
            outputs = [case.step(work, num_single, padding=3).float().cpu() for case in (found, expected)]
            assert error(*outputs) < BOUNDS[dtype], work
            ends |= {row: start + length for row, start, length in work}
        rows, positions = torch.tensor([list(ends), list(ends.values())])
        states = [fold(case.state, rows.to(case.conv.device), positions.to(case.conv.device))[0].cpu()
                  for case in (found, expected)]  # fmt: skip
        assert error(*states) < BOUNDS[dtype]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.isfinite().all()
    return float((found - expected).abs().max() / expected.abs().max())


CONFIGURATIONS: dict[str, dict[str, object]] = {
    "eager": {"graph_rows": "off", "graph_tokens": "off"},
    "chunks of odd sizes": {"graph_rows": "off", "graph_tokens": "off", "max_step_tokens": 7},
    "graphs of decode steps": {"graph_rows": "1,3", "graph_tokens": "off"},
    "graphs of all steps": {"graph_rows": "1,3", "graph_tokens": "16,64", "max_step_tokens": 64},
    "preempted": {"graph_rows": "1,3", "graph_tokens": "16,64", "max_step_tokens": 64, "kv_tokens": 112},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A random checkpoint, prompts, and the greedy tokens of transformers."""
    folder = tmp_path_factory.mktemp("hybrid")
    model = save_random(folder, {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]})
    prompts = [tokens.tolist() for tokens in random_tokens(LENGTHS, VOCAB, seed=3)]
    return folder, prompts, [greedy_tokens(model, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_engines_generate_the_tokens_of_transformers(
    name: str, checkpoint: tuple[Path, list[list[int]], list[list[int]]]
) -> None:
    """Eight sequences take turns in three rows: each begins with what the one before has left."""
    folder, prompts, expected = checkpoint
    fields = {"max_len": 96, "max_rows": 3, "kv_tokens": 1024} | CONFIGURATIONS[name]
    driven = DrivenEngine.build(EngineOptions(model=str(folder), device="cuda", dtype="float32", **fields))  # type: ignore[arg-type]
    assert (runtime_of(driven).graphs is not None) == (fields["graph_rows"] != "off")
    params = SamplingParams(TOKENS, temperature=0.0, ignore_eos=True)
    assert driven.generate(prompts, [params] * len(prompts)) == expected
    assert driven.generate(prompts, [params] * len(prompts)) == expected, "from checkpoints"
    # With few pages, the prompts that follow evict those of each prompt, so one prompt is repeated alone.
    longest = LENGTHS.index(max(LENGTHS))
    for _ in range(2):
        assert driven.generate([prompts[longest]], [params]) == [expected[longest]], "from checkpoints"
    assert driven.engine.scheduler.memory.num_hit_tokens > 0
    assert (driven.engine.stats.preemptions > 0) == (name == "preempted")
