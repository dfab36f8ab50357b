"""The default model with keys and values in 8-bit floats beside itself without: what text that it writes loses."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tandem.engine_core.runtime.runtime import TorchRuntime
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.protocol.engine_options import Device, EngineOptions, KVDtype
from tandem.protocol.params import SamplingParams
from tests.support.engine_driver import DrivenEngine
from tests.support.teacher_forcing import Forced

QUESTIONS = (
    "What does textwrap.dedent do?",
    "How do I sort a list?",
    "What does os.path.join return?",
    "What is collections.Counter?",
)
LENGTH = 60


def build(device: Device, kv_dtype: KVDtype, page_size: int = 16) -> DrivenEngine:
    options = EngineOptions(
        device=device, kv_dtype=kv_dtype, page_size=page_size, max_rows=6, max_len=256, max_step_tokens=192,
        kv_tokens=4096, graph_rows="1,4,6" if device == "cuda" else None,
    )  # fmt: skip
    return DrivenEngine.build(options)


def runtime_of(driven: DrivenEngine) -> TorchRuntime:
    runtime = driven.engine.runtime
    assert isinstance(runtime, TorchRuntime)
    return runtime


def texts(driven: DrivenEngine) -> list[list[int]]:
    """Ids of questions and of what the model says to them."""
    tokenizer = Tokenizer.from_file(str(Path(DEFAULT_MODEL) / "tokenizer.json"))
    prompts = [tokenizer.encode(question).ids for question in QUESTIONS]
    params = [SamplingParams(LENGTH, temperature=0.0, ignore_eos=True)] * len(prompts)
    return [prompt + said for prompt, said in zip(prompts, driven.generate(prompts, params), strict=True)]


def logits(driven: DrivenEngine, sequences: list[list[int]]) -> dict[str, dict[tuple[int, int], Tensor]]:
    """By sort of step and (sequence, position), on the CPU; the sorts are the same whoever runs them."""
    forced = Forced(runtime_of(driven), sequences)
    forced.run(seed=1)
    return {
        sort: {(index, position): after.cpu() for index, position, after in found}
        for sort, found in forced.found.items()
    }


class Loss:
    """How far two sets of logits of the same positions are apart."""

    def __init__(self, wide: dict[tuple[int, int], Tensor], narrow: dict[tuple[int, int], Tensor]) -> None:
        assert wide.keys() == narrow.keys()
        one, other = torch.stack(list(wide.values())), torch.stack([narrow[key] for key in wide])
        self.count = len(one)
        self.mean = (one - other).abs().mean().item()
        self.largest = (one - other).abs().max().item()
        self.deviation = one.std().item()
        self.same_choice = (one.argmax(-1) == other.argmax(-1)).float().mean().item()

    def __str__(self) -> str:
        return (
            f"{self.count} positions, logits' error {self.mean:.3f} on average and {self.largest:.2f} at most "
            f"(deviation {self.deviation:.2f}), the same choice {100 * self.same_choice:.1f} %"
        )
