"""The runner of the kernel benchmarks."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import __main__ as kernels
from benchmarks.kernels.suite import MODELS, Options, Record
from benchmarks.measuring import results


def test_chosen_benchmarks_run_in_order_and_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Options]] = []

    def suite(name: str) -> tuple[object, str]:
        def measure(options: Options) -> list[Record]:
            seen.append((name, options))
            return [{"us": float(len(seen))}]

        return measure, name

    monkeypatch.setattr(kernels, "SUITES", {name: suite(name) for name in ("linear", "sampling", "fp8-kv")})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    kernels.main(
        ["--only", "sampling", "linear", "--model", "1b", "--rows", "1", "64", "--sweep", "--save", "kernels_1b"]
    )
    options = Options(MODELS["1b"], (1, 64), True)
    assert seen == [("sampling", options), ("linear", options)]
    saved = json.loads((tmp_path / "kernels_1b.json").read_text())
    assert saved["figures"] == {"sampling": [{"us": 1.0}], "linear": [{"us": 2.0}]}
    assert (saved["config"]["gpu"], saved["config"]["rows"]) == ("Test GPU", [1, 64])


def test_all_benchmarks_run_by_default() -> None:
    arguments = kernels.arguments_parser().parse_args([])
    assert (arguments.only, arguments.rows, arguments.save) == (list(kernels.SUITES), [], None)


@pytest.mark.parametrize("arguments", [["--only", "gemm"], ["--model", "70b"], ["--rows", "many"], ["--only"]])
def test_unknown_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        kernels.main(arguments)
    assert caught.value.code == 2
