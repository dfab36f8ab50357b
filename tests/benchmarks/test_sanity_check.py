"""The one-line checks of families: verdicts, and that every family has a tiny checkpoint."""

from pathlib import Path

import pytest
import torch

from benchmarks import sanity_check
from benchmarks.porting.tiny import TINY
from benchmarks.sanity_check import TOLERANCES, judge, main
from tandem.engine_core.models.registry import FAMILIES

LOGITS = torch.eye(6) * 3


def test_every_family_has_a_tiny_checkpoint() -> None:
    assert set(FAMILIES) <= set(TINY)


def test_a_family_and_a_folder_get_a_line_each(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--family", "Qwen3ForCausalLM", str(tiny), "--tokens", "6", "--device", "cpu"]) == 0
    folder, family = capsys.readouterr().out.splitlines()
    assert folder.startswith(f"ok   {tiny.name:<24} 6/6 ")
    assert family.startswith("ok   Qwen3ForCausalLM         6/6 ")


def test_a_checkpoint_that_fails_does_not_hide_the_next(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sanity_check.TOLERANCES, "float32", 0.0)
    assert main([str(tmp_path), str(tiny), "--tokens", "2", "--device", "cpu"]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"FAIL {tmp_path.name:<24} ConfigError: ")
    assert second.startswith(f"FAIL {tiny.name:<24} 2/2 "), "beyond the tolerance"


def test_a_token_that_differs_passes_only_as_a_near_tie() -> None:
    near = LOGITS.clone()
    near[3, 4] = 2.9
    for reference, error, passed in ((LOGITS, 0.05, False), (near, 0.05, True), (near, 0.04, False)):
        mine = reference.clone()
        mine[0, 0] += error
        # Three tokens follow a prompt of three; the logits at position 3 choose the second, 3 or 4.
        found = judge([2, 4, 5], [2, 3, 5], mine, reference)
        assert (found.equal, found.tokens) == (1, 3)
        assert found.passed(1.0) == passed
    assert str(judge([2, 4, 5], [2, 3, 5], near + 0.1, near)).startswith("1/3 ")


def test_nan_fails() -> None:
    mine = LOGITS.clone()
    mine[2, 2] = torch.nan
    assert not judge([2, 3], [2, 3], mine, LOGITS).passed(TOLERANCES["bfloat16"])
