"""A run of the benchmark of weight updates on a CPU, with the default model and gloo."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks import bench_weight_updates
from benchmarks.bench_weight_updates import MIN_BUFFERS, medians
from tests.support.refusals import numbers_in

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.slow
@pytest.mark.parametrize("has_shape", [False, True])
def test_updates_are_timed_and_a_killed_trainer_is_noticed(tmp_path: Path, has_shape: bool) -> None:
    out, flags = tmp_path / "updates.json", []
    if has_shape:
        (tmp_path / "shape").mkdir()
        (tmp_path / "shape" / "config.json").write_text(json.dumps(SHAPE))
        flags = ["--shape", str(tmp_path / "shape")]
    assert bench_weight_updates.main(["--device", "cpu", "--updates", "4", "--out", str(out), *flags]) == 0
    saved = json.loads(out.read_text())
    assert saved["origin"]["versions"] and saved["config"]["device"] == "cpu" and saved["config"]["updates"] == 4
    figures = saved["figures"]
    assert len(figures["updates"]) == 4 and len(figures["join_seconds"]) == 2
    assert all(seconds > 0 for update in figures["updates"] for seconds in update.values())
    assert figures["bytes"] // MIN_BUFFERS == saved["config"]["buffer_bytes"] > 0
    assert len(figures["checks"]) == 5 and all(figures["checks"].values())


def test_fewer_than_two_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(bench_weight_updates, "visible_gpus", lambda: ["0"]), pytest.raises(SystemExit) as ended:
        bench_weight_updates.main([])
    assert ended.value.code == 2 and numbers_in(capsys.readouterr().err.splitlines()[-1]) == [1]


def test_too_few_updates_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_weight_updates.main(["--device", "cpu", "--updates", "2"])
    assert ended.value.code == 2 and "--updates 2" in capsys.readouterr().err


def test_medians_leave_out_the_first_update() -> None:
    times = [(9.0, 8.0), (0.5, 0.25), (0.75, 0.5), (0.25, 0.125)]
    updates = [{"update_seconds": update, "finish_seconds": finish} for update, finish in times]
    assert medians(updates) == {"median_update_seconds": 0.5, "median_finish_seconds": 0.25}
