"""Random small models on CUDA against transformers in float32, with every implementation of attention.

Tokens are compared where the reference's top-2 gap exceeds twice the largest logit error found; the rest is counted.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tandem.engine_core.attention.base import LayerAttention
from tandem.engine_core.attention.flashinfer import FlashInferPlanner
from tandem.engine_core.attention.torch import TorchPlanner
from tandem.engine_core.attention.triton import RaggedGraphPlanner, RaggedPlanner
from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup import attention as startup_attention
from tandem.protocol.engine_options import Device, Dtype, EngineOptions, PageSize
from tests.support.engine_driver import DrivenEngine
from tests.support.flashinfer_kernels import graph_planner, missing_kernel
from tests.support.plan_recording import reset, runtime_of
from tests.support.teacher_forcing import Agreement, Forced, random_sequences, reference_logits, save_random

pytestmark = pytest.mark.gpu

ROWS, LONGEST = 6, 160
DEVICE: Device = "cuda"
SHAPES = {64: (8, 2), 128: (4, 2)}
"""Query and key heads by head_dim."""
BOUNDS: dict[str, float] = {"float32": 5e-3, "bfloat16": 0.5}
SORTS = {"chunks", "mixed", "decode from graphs"}


class Checkpoint:
    """A random model, two sets of sequences, and transformers' logits for them."""

    def __init__(self, directory: Path, head_dim: int) -> None:
        self.directory = directory
        save_random(directory, head_dim, *SHAPES[head_dim], seed=head_dim)
        self.sequences = [random_sequences(ROWS, LONGEST, seed) for seed in (1, 2)]
        reference = reference_logits(directory, [*self.sequences[0], *self.sequences[1]], DEVICE)
        self.reference = [reference[:ROWS], reference[ROWS:]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Checkpoint]:
    return {head_dim: Checkpoint(tmp_path_factory.mktemp(f"d{head_dim}"), head_dim) for head_dim in SHAPES}


def without_flashinfer(head_dim: int) -> str:
    """Return why FlashInfer does not support the prompts of a checkpoint in bfloat16; empty if it does."""
    return missing_kernel(*SHAPES[head_dim], head_dim, torch.bfloat16, [LayerAttention(head_dim**-0.5)])


def build(
    checkpoint: Checkpoint, dtype: Dtype, page_size: PageSize = 16, graph_tokens: str | None = None
) -> TorchRuntime:
    options = EngineOptions(
        model=str(checkpoint.directory),
        device=DEVICE,
        dtype=dtype,
        max_rows=ROWS,
        max_len=LONGEST + 16,
        max_step_tokens=ROWS * 32,
        kv_tokens=ROWS * 512,
        graph_rows="1,4,6",
        page_size=page_size,
        graph_tokens=graph_tokens,
    )
    return runtime_of(DrivenEngine.build(options))


def check(runtime: TorchRuntime, checkpoint: Checkpoint, label: str, bound: float) -> None:
    """Runs both sets of sequences; each kind of step must agree."""
    mine: dict[str, list[Tensor]] = {}
    theirs: dict[str, list[Tensor]] = {}
    for seed, (sequences, reference) in enumerate(zip(checkpoint.sequences, checkpoint.reference, strict=True)):
        reset(runtime)
        forced = Forced(runtime, sequences)
        forced.run(seed)
        assert forced.steps.keys() >= SORTS, forced.steps
        for sort, found in forced.found.items():
            mine.setdefault(sort, []).extend(logits for _, _, logits in found)
            theirs.setdefault(sort, []).extend(reference[index][position] for index, position, _ in found)
    for sort in sorted(mine):
        agreement = Agreement.of(torch.stack(mine[sort]), torch.stack(theirs[sort]))
        print(f"\n{label}, {sort}: {agreement}", end="")
        assert agreement.different == 0
        assert agreement.excluded < agreement.compared
        assert agreement.error < bound


@pytest.mark.parametrize("head_dim", list(SHAPES))
@pytest.mark.parametrize(
    ("dtype", "few"),
    [("float32", 256), ("bfloat16", 256), ("bfloat16", 0)],
)
def test_prompts_from_graphs_agree_with_transformers(
    checkpoints: dict[int, Checkpoint],
    head_dim: int,
    dtype: Dtype,
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton up to `few` tokens, FlashInfer beyond; decode always in Triton."""
    if few == 0 and (missing := without_flashinfer(head_dim)):
        pytest.skip(missing)
    kernels = RaggedGraphPlanner if few else graph_planner()
    monkeypatch.setattr(startup_attention, "FEW_TOKENS", few)
    runtime = build(checkpoints[head_dim], dtype)
    assert runtime.graphs is not None
    prompts = [mixed.prompts for slot in runtime.graphs.mixed for mixed in slot.values()]
    assert prompts and all(isinstance(one, kernels) for one in prompts)
    label = f"head_dim {head_dim}, {dtype}, graphs of {kernels.__name__}"
    check(runtime, checkpoints[head_dim], label, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", list(SHAPES))
def test_eager_prompts_agree_with_transformers(checkpoints: dict[int, Checkpoint], head_dim: int, dtype: Dtype) -> None:
    """bfloat16: FlashInfer if it has a kernel, float32: Triton; then torch attention for the same."""
    checkpoint = checkpoints[head_dim]
    runtime = build(checkpoint, dtype, graph_tokens="off")
    kernels = RaggedPlanner if dtype == "float32" or without_flashinfer(head_dim) else FlashInferPlanner
    assert all(isinstance(slot.attention, kernels) for slot in runtime.slots)
    label = f"head_dim {head_dim}, {dtype}, eager"
    check(runtime, checkpoint, f"{label} {kernels.__name__}", BOUNDS[dtype])
    for slot in runtime.slots:
        slot.attention = TorchPlanner(runtime.model.config.attention_kinds)
    check(runtime, checkpoint, f"{label} torch", BOUNDS[dtype])


@pytest.mark.parametrize(
    ("dtype", "page_size"), [("float32", 1), *(("bfloat16", page_size) for page_size in (1, 8, 128, "max"))]
)
def test_every_page_size_agrees_with_transformers(
    checkpoints: dict[int, Checkpoint], dtype: Dtype, page_size: PageSize
) -> None:
    runtime = build(checkpoints[64], dtype, page_size)
    assert runtime.tables.pages.shape[1] == (1 if page_size == "max" else -(-(LONGEST + 16) // int(page_size)))
    check(runtime, checkpoints[64], f"{dtype}, pages of {page_size}", BOUNDS[dtype])
