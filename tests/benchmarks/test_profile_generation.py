"""Times by operation and by kernel: out of made-up traces, and out of real steps on the CPU."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.porting.local_engine import LocalEngine, small_options
from benchmarks.porting.scopes import PREFIX, STEP, Scoped, scoped
from benchmarks.porting.trace import Totals, kernels, operations, read_trace
from benchmarks.profile_generation import main, table


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def scope(operation: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return event(PREFIX + operation, "user_annotation", ts, dur, tid)


def plain(totals: Totals) -> dict[str, tuple[float, int]]:
    return {name: (total.microseconds, total.count) for name, total in totals.items()}


SCOPES = [scope(STEP, 0, 100), scope("qkv", 10, 30), scope("norm", 12, 8), scope("mlp", 40, 20), scope("norm", 41, 9)]


def test_on_a_cpu_an_operation_has_the_time_of_its_scopes_less_that_of_nested_ones() -> None:
    other_thread = scope("mlp", 15, 5, tid=2)
    assert plain(operations([*reversed(SCOPES), other_thread])) == {
        "other": (50, 1), "qkv": (22, 1), "norm": (17, 2), "mlp": (16, 2),
    }  # fmt: skip


def test_on_a_gpu_an_operation_has_the_kernels_that_its_scope_launched() -> None:
    launches = [
        event("cuLaunchKernelEx", "cuda_driver", at, 1, correlation=number)
        for number, at in enumerate((5, 11, 13, 39, 45, 55, 101))
    ]
    device = [event("k", "kernel", 500 + number, 2**number, 7, number) for number in range(7)]
    unknown = event("k", "gpu_memcpy", 900, 1000, 7, 99)
    found = plain(operations([*SCOPES, *launches, *device, unknown]))
    assert found == {"other": (1 + 64 + 1000, 3), "qkv": (2 + 8, 2), "norm": (4 + 16, 2), "mlp": (32, 1)}
    assert plain(kernels([*SCOPES, *launches, *device, unknown])) == {"k": (127 + 1000, 8)}


def test_without_kernels_torch_operators_count_on_their_own() -> None:
    events = [event("aten::linear", "cpu_op", 0, 10), event("aten::mm", "cpu_op", 1, 8), *SCOPES]
    assert plain(kernels(events)) == {"aten::mm": (8, 1), "aten::linear": (2, 1)}


def test_trace_is_read_with_and_without_compression(tmp_path: Path) -> None:
    data = json.dumps({"traceEvents": [*SCOPES, {"ph": "M", "name": "process_name"}]}).encode()
    for path, stored in ((tmp_path / "t.json", data), (tmp_path / "t.json.gz", gzip.compress(data))):
        path.write_bytes(stored)
        assert read_trace(path) == SCOPES


def test_table_has_times_a_step_and_says_what_is_left_out() -> None:
    totals = kernels([event("a" * 70, "kernel", 0, 3000), event("b", "kernel", 0, 1000), event("b", "kernel", 0, 0)])
    assert table("kernel", totals, 2, most=1).splitlines()[1:] == [
        f"{'a' * 57}... {1.5:>9.3f} {75:>6.1f}% {0.5:>11.1f}", "and 1 more",
    ]  # fmt: skip


@pytest.mark.parametrize("phase", ["decode", "prompt"])
def test_steps_on_a_cpu_are_split_into_all_operations(
    tiny: Path, tmp_path: Path, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--rows",
        "2",
        "--prompt",
        "12",
        "--steps",
        "3",
        "--device",
        "cpu",
        "--phase",
        phase,
        "--out",
        str(tmp_path),
    ]
    main(["--model", str(tiny), *flags])
    output = capsys.readouterr().out
    steps = int(output.split()[0])
    assert re.search(rf"\b{phase} .*\b2 rows\b.*\bcpu\b", output)
    totals = operations(read_trace(tmp_path / "operations.json.gz"))
    calls = {name: total.count / steps for name, total in totals.items()}
    layers = 4.0
    assert calls.pop("other") >= 1, "a tick may do something else"
    # A plan and a run for each layer.
    assert calls.pop("attention") == layers + 1
    assert calls == {
        "norm": 2 * layers + 1, "qkv": layers, "rotary": layers, "attention output": layers, "mlp": layers,
        "embedding": 1, "head": 1, "sampling": 1,
    }  # fmt: skip
    assert "torch operator" in output and "aten::" in output


def test_scopes_are_removed_afterwards(tiny: Path) -> None:
    runtime = LocalEngine.open(small_options(tiny, "cpu", "float32", positions=16)).runtime
    before = [runtime.sampler, runtime.model.norm, *vars(runtime.model.layers[0].attention).values()]
    with scoped(runtime):
        assert isinstance(runtime.model.norm, Scoped)
    after = [runtime.sampler, runtime.model.norm, *vars(runtime.model.layers[0].attention).values()]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_model_that_is_not_supported_ends_the_run_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["DbrxForCausalLM"]}')
    with pytest.raises(SystemExit) as ended:
        main(["--model", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ended.value.code == 2
    assert "DbrxForCausalLM" in capsys.readouterr().err
