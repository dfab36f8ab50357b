"""Adapters that are copied into slots of a GPU are those of their files."""

from pathlib import Path

import pytest
import torch

from tandem.engine_core.kernels.kernel_set import torch_kernels
from tandem.engine_core.layers.lora_linear import LoraSlots
from tandem.engine_core.layers.torch_linear import TorchLinear
from tandem.engine_core.lora.adapter_files import read_adapter
from tandem.engine_core.lora.adapter_loader import SideCopies, ThreadedLoader
from tests.support.lora_folder import write_adapter

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH, LAYERS = 96, 200, 5
MODULES = {
    f"model.layers.{layer}.mlp.{name}": shape
    for layer in range(LAYERS)
    for name, shape in {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}.items()
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_slots_of_a_gpu_hold_the_adapters_that_were_placed_last(dtype: torch.dtype, tmp_path: Path) -> None:
    kernels, device = torch_kernels(), torch.device("cuda")
    slots = LoraSlots(2, 8, kernels.group_tokens)
    for layer in range(LAYERS):
        for name, inputs, parts in (
            ("gate_up_proj", HIDDEN, {"gate_proj": WIDTH, "up_proj": WIDTH}),
            ("down_proj", WIDTH, {"down_proj": HIDDEN}),
        ):
            base = TorchLinear(torch.empty(sum(parts.values()), inputs), None, kernels)
            slots.wrap(f"model.layers.{layer}.mlp.{name}", base, inputs, parts, device, dtype, kernels)
    folders = {}
    for version, (targets, rank) in enumerate([(("gate_proj", "up_proj", "down_proj"), 8), (("down_proj",), 3)], 1):
        modules = {name: shape for name, shape in MODULES.items() if name.endswith(targets)}
        folders[version] = write_adapter(tmp_path / str(version), Path(), targets, rank, version, modules=modules)
    loader = ThreadedLoader(slots, 2, lambda: None, SideCopies(device, slots))
    for version, folder in folders.items():
        loader.read(version, str(folder), "")
    for version, slot in ((1, 1), (2, 2), (2, 1), (1, 2)):
        loader.place(version, str(folders[version]), slot)
    loader.wait()
    assert [result.problem for result in loader.take_results()] == [""] * 6
    for version, slot in ((2, 1), (1, 2)):
        updates = read_adapter(folders[version], slots).updates
        for name, linear in slots.linears.items():
            if name not in updates:
                assert not linear.ranks[slot].any()
                continue
            update = updates[name]
            rank = len(update.b)
            assert torch.equal(linear.ranks[slot].cpu(), update.ranks)
            assert torch.equal(linear.a[slot - 1, :, :rank].cpu(), update.a)
            assert torch.equal(linear.b[slot - 1, :rank].cpu(), update.b)
