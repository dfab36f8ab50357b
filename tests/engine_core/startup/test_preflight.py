"""The preflight report of an engine agrees with its start, or names the problems."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.kernels.gpu_traits import GpuTraits
from tandem.engine_core.startup.engine import build_engine
from tandem.engine_core.startup.kv_sizing import GIB
from tandem.engine_core.startup.preflight import Gpu, preflight
from tandem.engine_core.stats import new_stats
from tandem.engine_core.wire.heartbeat import Status
from tandem.protocol.engine_options import EngineOptions
from tandem.protocol.preflight import PreflightReport
from tests.engine_core.models.test_llama import save_random
from tests.fakes.gpus import L4, T4
from tests.fakes.mailbox import FakeMailbox
from tests.support import parity
from tests.support.model_folder import write_config, write_model
from tests.support.quantized_checkpoint import (
    LAYOUTS,
    gptq,
    packed_tensors,
    quantize_checkpoint,
    quantize_layers,
    set_quantization,
)
from tests.support.refusals import numbers_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path)
    return tmp_path


def preflight_of(
    folder: Path, traits: GpuTraits | None = None, free: int = 20 * GIB, total: int | None = None, **options: Any
) -> PreflightReport:
    gpus = [] if traits is None else [Gpu(traits, free, 24 * GIB)]
    return preflight(EngineOptions(model=str(folder), **options), gpus, lambda: free, lambda: total or free)


@pytest.mark.parametrize("options", [{}, {"max_rows": 3, "kv_tokens": 160}, {"max_len": 32, "prefix_cache": "off"}])
def test_choices_are_those_of_the_engine(folder: Path, options: dict[str, Any]) -> None:
    found = preflight_of(folder, device="cpu", **options)
    threads, status = torch.get_num_threads(), Status(1, new_stats())
    build_engine(EngineOptions(model=str(folder), device="cpu", threads=1, **options), FakeMailbox(), status)
    torch.set_num_threads(threads)
    assert found.problems == []
    assert found.choices["rows"].startswith(f"{status.stats.rows_total} (")
    assert found.choices["KV cache"].startswith(f"{status.stats.pages_total * 16} tokens, ")


def test_choices_name_their_reasons(folder: Path) -> None:
    usual = preflight_of(folder)
    assert usual.gpus == []
    assert usual.model["architecture"] == "LlamaForCausalLM" and usual.model["supported"] == "yes"
    assert re.fullmatch(r"cpu \(.*\bCUDA\b.*\)", usual.choices["device"])
    assert re.fullmatch(r"32 \(.*\bcpu\)", usual.choices["rows"])
    given = preflight_of(folder, device="cpu", dtype="float16", max_rows=5, kv_tokens=64)
    for choice, value, flag in (
        ("device", "cpu", "--device"),
        ("dtype", "float16", "--dtype"),
        ("rows", "5", "--max-rows"),
    ):
        assert re.fullmatch(rf"{value} \(.*{flag}\)", given.choices[choice])
    assert given.choices["KV cache"].endswith("--kv-tokens)")


def test_a_gpu_is_chosen_with_its_share_of_memory(folder: Path) -> None:
    write_config(folder, torch_dtype="bfloat16")
    found = preflight_of(folder, L4)
    assert found.problems == []
    (gpu,) = found.gpus
    assert gpu.startswith("NVIDIA L4, ") and numbers_in(gpu) == [8.9, 58, 24, 20]
    assert found.choices["device"].startswith("cuda (")
    assert re.fullmatch(r"bfloat16 \(auto on cuda; .*\bbfloat16\)", found.choices["dtype"])
    assert found.choices["rows"].startswith("512 (")
    assert found.choices["KV cache"].startswith("at most ")
    assert "20.00 GiB (--gpu-memory 0.9 " in found.choices["KV cache"]


@pytest.mark.parametrize(
    ("traits", "free", "options", "problem"),
    [
        (T4, GIB, {"dtype": "float16"}, "the Tesla T4 has compute capability 7.5, but the kernels need 8.0"),
        (None, GIB, {"device": "cuda"}, "torch sees no CUDA device"),
        (None, 1000, {}, "the weights take 0.00 GiB, but 0.00 GiB are free"),
        (None, GIB, {"kv_tokens": 10**10}, "lower --kv-tokens"),
        (None, GIB, {"max_rows": 0}, "--max-rows 0: must be from 1 to 16384"),
        (None, GIB, {"max_len": 10**6}, "the model's positions end at"),
    ],
)
def test_problem_is_the_engine_s_reason(
    folder: Path, traits: GpuTraits | None, free: int, options: dict[str, Any], problem: str
) -> None:
    found = preflight_of(folder, traits, free, **options)
    assert len(found.problems) == 1 and problem in found.problems[0]
    assert found.choices == {}


def test_problems_of_all_settings_are_reported_at_once(folder: Path) -> None:
    found = preflight_of(
        folder, None, GIB, device="cuda", kv_memory=1, kv_tokens=1, max_len=10**6, batching="static", policy="priority",
        prefix_cache="on", page_size=2**20, graph_rows="x", graph_tokens="0", max_step_tokens=3,
    )  # fmt: skip
    starts = (
        "--device cuda, but torch sees no CUDA device", "--kv-memory and --kv-tokens both size the KV pool",
        "--max-len 1000000, but", "--batching static and --policy priority exclude",
        "--batching static and --prefix-cache on exclude", "--max-step-tokens 3 is below --max-rows 256",
        "--page-size 1048576 is more than", "--graph-rows x: must be", "--graph-tokens 0: sizes must be",
    )  # fmt: skip
    assert len(found.problems) == len(starts)
    for problem, start in zip(found.problems, starts, strict=True):
        assert problem.startswith(start), problem


@pytest.mark.parametrize(("traits", "options"), [(None, {}), (None, {"kv_tokens": 1000}), (L4, {"dtype": "float16"})])
def test_memory_that_others_use_is_a_shortage_and_no_problem(
    folder: Path, traits: GpuTraits | None, options: dict[str, Any]
) -> None:
    found = preflight_of(folder, traits, free=1000, total=GIB, **options)
    assert (found.problems, found.choices) == ([], {})
    assert numbers_in(found.shortage)[-1] == 0


def test_models_that_are_not_supported_are_reported(folder: Path) -> None:
    write_config(folder, architectures=["GPT2LMHeadModel"])
    found = preflight_of(folder)
    assert "GPT2LMHeadModel" in found.problems[0]
    assert found.model == {"architecture": "GPT2LMHeadModel", "supported": "no"}
    assert "has no config.json" in preflight_of(folder / "nothing").problems[0]


def test_formats_of_weights_keys_and_values_are_named(folder: Path) -> None:
    plain, quantized = (
        preflight_of(folder, device="cpu"),
        preflight_of(folder, device="cpu", quantize="fp8", kv_dtype="fp8"),
    )
    assert plain.model["weights"].endswith("GiB in float32")
    assert re.search(r" fp8,.* float32;.*\bslow\b", quantized.model["weights"])
    assert "GiB of float8_e4m3fn (" in quantized.choices["KV cache"]
    assert "float8" not in plain.choices["KV cache"]


def test_a_multimodal_model_is_checked_as_its_text_half(folder: Path) -> None:
    plain = preflight_of(folder)
    text = json.loads((folder / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 8}
    nested = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(nested))
    found = preflight_of(folder)
    assert found.problems == []
    assert found.model["architecture"] == "Mistral3ForConditionalGeneration" and found.model["supported"] == "yes"
    assert (found.model["positions"], found.model["dtype"]) == (plain.model["positions"], "bfloat16")
    assert found.model["weights"] == plain.model["weights"]


@pytest.mark.parametrize("changes", [{"hidden_size": 96}, {"num_hidden_layers": 9}, {"vocab_size": 77}])
def test_tensors_that_do_not_fit_are_reported_as_at_a_start(folder: Path, changes: dict[str, int]) -> None:
    write_config(folder, **changes)
    threads = torch.get_num_threads()
    with pytest.raises(ConfigError, match=r"config\.json") as refused:
        build_engine(EngineOptions(model=str(folder), device="cpu", threads=1), FakeMailbox(), Status(1, new_stats()))
    torch.set_num_threads(threads)
    assert preflight_of(folder, device="cpu").problems == [str(refused.value)]
    assert not preflight_of(folder, device="cpu", load_format="dummy").problems


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_of_weights_fits(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    at_load = preflight_of(tmp_path, quantize="fp8")
    assert not at_load.problems and "unused entries" not in at_load.model
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    assert preflight_of(tmp_path).problems == []


def before_weights(folder: Path, weight_bytes: int, **options: Any) -> PreflightReport:
    (folder / "model.safetensors").unlink(missing_ok=True)
    return preflight(EngineOptions(model=str(folder), **options), [], lambda: GIB, lambda: GIB, weight_bytes)


@pytest.mark.parametrize(
    ("dtype", "gib"),
    [("bfloat16", "0.20"), ("half", "0.20"), ("torch.float16", "0.20"), ("float64", "0.05"), ("auto", "0.10"),
     ("load", "0.10"), ("fp", "0.10"), (None, "0.10")],
)  # fmt: skip
def test_weights_on_the_hub_are_converted_from_the_dtype_that_the_checkpoint_names(
    folder: Path, dtype: str | None, gib: str
) -> None:
    write_config(folder, torch_dtype=dtype)
    found = before_weights(folder, GIB // 10, device="cpu")
    assert found.problems == []
    assert found.model["weights"].startswith(f"{gib} GiB in float32")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "torch.uint8"])
def test_dtype_of_quantized_weights_alone_is_refused_before_they_are_downloaded(folder: Path, dtype: str) -> None:
    write_config(folder, torch_dtype=dtype)
    (problem,) = before_weights(folder, GIB // 10, device="cpu", dtype="bfloat16").problems
    assert f"dtype is {dtype} without a quantization_config" in problem


@pytest.mark.parametrize(
    ("stored", "named"),
    [("gptq", "gate_proj"), ("w4a16", "weight_packed")],
)
def test_an_index_that_contradicts_the_config_is_refused_before_the_weights_are_downloaded(
    stored: str, named: str, tmp_path: Path
) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    quantize_checkpoint(tmp_path, gptq(True, False) if stored == "gptq" else packed_tensors(True))
    names = list(load_file(tmp_path / "model.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert before_weights(tmp_path, GIB // 10, device="cpu").problems == []
    rules = {"dynamic": {"-:.*gate_proj": {}}} if stored == "gptq" else {}
    set_quantization(tmp_path, gptq(True, False).config | rules)
    (problem,) = before_weights(tmp_path, GIB // 10, device="cpu").problems
    assert named in problem


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_shapes_that_a_format_does_not_have_are_refused_before_the_weights_are_downloaded(
    load_format: str, tmp_path: Path
) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 80})
    set_quantization(tmp_path, gptq(True, False).config)
    (problem,) = before_weights(tmp_path, GIB // 10, device="cpu", load_format=load_format).problems
    assert "80 inputs" in problem


def test_a_model_with_windows_has_pages_of_several_groups(tmp_path: Path) -> None:
    """Of 12 layers, two attend to all positions."""
    from transformers import Gemma3TextConfig

    layers = {"num_hidden_layers": 12, "sliding_window": 1024, "max_position_embeddings": 32_768}
    parity.save_random(tmp_path, Gemma3TextConfig(**parity.SMALL | layers), seed=1)

    def cache(**flags: Any) -> str:
        options = EngineOptions(model=str(tmp_path), device="cpu", kv_tokens=32_768, **flags)
        return preflight(options, [], lambda: 8 << 30, lambda: 8 << 30).choices["KV cache"]

    # A window of 1024 takes 67 pages of 16 positions: a sequence of 32768 tokens takes 2048 + 5 * 67.
    held = (32_768 // 16) * 6 // (2048 + 5 * 67) * 32_768
    assert held > 32_768
    assert re.match(r"32768 tokens\b[^,]*, \d+ [^,]*\b32768, ", cache())
    assert int(cache().split(", ")[1].split()[0]) >= held
    assert re.search(r"\b2 layers, 6 KV groups: 1 [^,]*, 5 with a window of 1024 \(", cache())
    assert "groups" not in cache(page_size="max")
    assert "(--page-size max)" in cache(page_size="max")
    assert "groups" not in cache(max_len=1024)
    assert "window" not in cache(max_len=1024, page_size="max")


def test_the_window_of_all_layers_is_named(folder: Path) -> None:
    write_config(folder, architectures=["MistralForCausalLM"], sliding_window=8)
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert re.search(rf"\bwindow of 8\b.* {layers} layers\b", preflight_of(folder, device="cpu").choices["KV cache"])


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, "on"),
        ({"prefix_cache": "off"}, "off (--prefix-cache off)"),
        ({"page_size": "max"}, "off (--page-size max)"),
        ({"batching": "static"}, "off (--batching static)"),
    ],
)
def test_the_reason_for_no_prefix_cache_is_named(flags: dict[str, Any], found: str, folder: Path) -> None:
    assert preflight_of(folder, device="cpu", **flags).choices["prefix cache"] == found


def test_a_pool_below_one_sequence_is_a_warning_with_the_size_to_ask_for(folder: Path) -> None:
    write_config(folder, max_position_embeddings=4096)
    warned = preflight_of(folder, device="cpu", kv_memory=2**16)
    assert warned.problems == []
    tokens = int(warned.choices["KV cache"].split()[0])
    assert numbers_in(warned.choices["warning"])[:2] == [tokens, 4096]
    needed = int(warned.choices["warning"].split("--kv-memory to ")[1].split()[0])
    assert "warning" not in preflight_of(folder, device="cpu", kv_memory=needed).choices
    assert "warning" in preflight_of(folder, device="cpu", kv_memory=needed - 1).choices


def test_dummy_weights_have_the_bytes_of_the_config_s_shapes(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors").values()
    size = 4 * sum(tensor.numel() for tensor in stored)
    (folder / "model.safetensors").unlink()
    enough = preflight_of(folder, device="cpu", load_format="dummy", free=size + (1 << 20), max_len=32)
    assert (enough.problems, enough.shortage) == ([], "")
    short = preflight_of(folder, device="cpu", load_format="dummy", free=size - 1, max_len=32)
    assert "weights" in short.problems[0]
    assert short.choices == {}


def test_the_layers_of_a_mixed_checkpoint_are_counted_by_format(tmp_path: Path) -> None:
    """Each of two layers has seven linear layers."""
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    layout = LAYOUTS["fp8_block"]
    quantize_layers(tmp_path, lambda name: layout if name.endswith(("q_proj", "k_proj", "v_proj")) else None,
                    layout.config | {"modules_to_not_convert": ["o_proj", "o_prj", "re:.*mtp.*"]})  # fmt: skip
    num_layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    total, plain = 7 * num_layers, 4 * num_layers
    model = preflight_of(tmp_path, device="cpu").model
    assert numbers_in(model["weights"])[1:4] == [total - plain, total, plain]
    assert all(word in model["weights"] for word in ("fp8", "16 bits", "float32", "slow"))
    # o_proj is excluded by the config.
    assert numbers_in(model["16-bit layers"])[0] == 3 * num_layers
    assert "model.layers.0.mlp.down_proj" in model["16-bit layers"] and "o_proj" not in model["16-bit layers"]
    assert model["unused entries"].endswith(": o_prj")


def test_a_checkpoint_without_quantized_layers_is_not_slow(tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    set_quantization(tmp_path, gptq(True, False).config)
    model = preflight_of(tmp_path, device="cpu").model
    num_layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
    assert re.search(rf" float32, none of {7 * num_layers}\b", model["weights"]) and "slow" not in model["weights"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_layers_in_one_format_are_not_counted(name: str, tmp_path: Path) -> None:
    save_random(tmp_path, {"hidden_size": 64, "intermediate_size": 96})
    quantize_checkpoint(tmp_path, LAYOUTS[name])
    model = preflight_of(tmp_path, device="cpu").model
    assert ", linear layers" in model["weights"] and not {"16-bit layers", "unused entries"} & model.keys()
