"""A GPU is refused or accepted by its traits."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.runtime import device as devices
from tandem.engine_core.runtime.device import CpuDevice, _cgroup_room
from tandem.engine_core.startup import device as startup
from tandem.engine_core.startup.device import CpuParts, CudaParts
from tests.fakes.gpus import A100, H200, L4, SUPPORTED, T4, GpuTraits
from tests.support.tiny_llama import CONFIG
from tests.test_architecture import MODULES


@pytest.mark.parametrize("gpu", SUPPORTED, ids=lambda gpu: gpu.name)
def test_gpus_from_ampere_on_are_accepted(gpu: GpuTraits) -> None:
    startup.check_gpu(gpu)
    assert gpu.pdl == (gpu.capability >= (9, 0))


def test_an_older_gpu_is_refused_by_name_before_anything_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "read_gpu_traits", lambda: T4)
    with pytest.raises(ConfigError, match=r"\bTesla T4\b.*\b7\.5\b.*\b8\.0\b"):
        startup.open_parts("cuda")


def test_fp8_keys_need_a_gpu_that_converts_them() -> None:
    CudaParts(CpuDevice(), L4).check_kv(torch.float8_e4m3fn)
    CudaParts(CpuDevice(), A100).check_kv(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"\bA100-SXM4-80GB\b.*\b8\.0\b.*\b8\.9\b"):
        CudaParts(CpuDevice(), A100).check_kv(torch.float8_e4m3fn)


def test_heads_without_a_kernel_are_refused() -> None:
    model = structs.replace(CONFIG, head_dim=80)
    with pytest.raises(ConfigError, match=r"\bhead_dim\b.*\b80\b.*--device\b"):
        CudaParts(CpuDevice(), H200).build_context(model, torch.bfloat16)
    CpuParts(CpuDevice()).build_context(model, torch.bfloat16)


def test_a_cpu_is_opened_without_asking_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "read_gpu_traits", lambda: pytest.fail("there is no GPU to read"))
    parts = startup.open_parts("cpu")
    assert isinstance(parts, CpuParts)
    assert parts.device.kind == "cpu"


def test_traits_are_those_that_cuda_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=227 * 1024, shared_memory_per_multiprocessor=228 * 1024,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {1: reported}.__getitem__)
    assert devices.read_gpu_traits() == H200


def test_a_malformed_tile_table_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> GpuTraits:
        raise ValueError("the tile table /a/nvidia-h200.json is malformed: rows 17 must be one of 1 - at $.products[3]")

    monkeypatch.setattr(startup, "check_installed", lambda: None)
    monkeypatch.setattr(startup, "read_gpu_traits", read)
    with pytest.raises(ConfigError, match=r"nvidia-h200\.json\b.*\$\.products\[3\]"):
        startup.open_parts("cuda")


def test_only_one_function_asks_cuda_for_the_kind_of_device() -> None:
    asking = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("get_device_properties", "get_device_capability")
    }
    assert asking == {"tandem.engine_core.runtime.device"}


def test_page_cache_of_a_container_counts_as_free(tmp_path: Path) -> None:
    assert _cgroup_room(tmp_path) == sys.maxsize
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 600\ninactive_file 500\n")
    for limit, room in (("1000\n", 600), ("300\n", 0), ("max\n", sys.maxsize)):
        (tmp_path / "memory.max").write_text(limit)
        assert _cgroup_room(tmp_path) == room
