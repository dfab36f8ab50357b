"""What the process that stages a checkpoint refuses, and its death."""

import io
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.header import read_header
from tandem.engine_core.loader.source_file import SourceFile
from tandem.engine_core.startup import stage_checkpoint
from tandem.engine_core.startup.checkpoint_stager import PROGRAM, ProcessStager
from tandem.engine_core.startup.file_stamps import folder_stamp
from tandem.engine_core.startup.opened_files import link_files
from tandem.engine_core.startup.served_model import ServedModel
from tandem.engine_core.startup.stage_checkpoint import check_swap, read_through
from tests.support.model_folder import write_model

GUARD_SECONDS = 120.0


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Return folders of the model that serves and of the same with other weights."""
    base, new = tmp_path / "base", tmp_path / "new"
    base.mkdir()
    write_model(base)
    shutil.copytree(base, new)
    change(new, lambda tensors: tensors["model.norm.weight"].mul_(2))
    return base, new


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_field(folder: Path, name: str, value: object) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {name: value}))


def test_other_weights_of_the_same_model_fit(pair: tuple[Path, Path]) -> None:
    base, new = pair
    check_swap(ServedModel.read(base), new)
    assert list(read_through(new))[-1] == 100


DIFFERENCES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "architecture": (
        lambda new: set_field(new, "architectures", ["MistralForCausalLM"]),
        ("LlamaForCausalLM", "MistralForCausalLM"),
    ),
    "epsilon": (lambda new: set_field(new, "rms_norm_eps", 0.5), ("rms_norm_eps", "0.5")),
    "end ids": (lambda new: set_field(new, "eos_token_id", [7]), ("eos_ids", "7")),
    "tokenizer": (lambda new: (new / "tokenizer.json").write_text("[]"), ("tokenizer.json",)),
    "missing tokenizer": (lambda new: (new / "tokenizer.json").unlink(), ("tokenizer.json", "missing")),
    "template": (lambda new: (new / "chat_template.jinja").write_text("{{ x }}"), ("chat template",)),
    "special token": (
        lambda new: (new / "tokenizer_config.json").write_text('{"bos_token": {"content": "<x>"}}'),
        ("special tokens", "<x>", "bos_token"),
    ),
    "map of special tokens": (
        lambda new: (new / "special_tokens_map.json").write_text('{"eos_token": "<x>"}'),
        ("special tokens", "<x>", "eos_token"),
    ),
    "generation config": (
        lambda new: (new / "generation_config.json").write_text('{"temperature": 0.3}'),
        ("generation_config.json", "0.3", "None"),
    ),
    "quantization": (
        lambda new: set_field(new, "quantization_config", {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        ("quantization",),
    ),
    "tying": (lambda new: set_field(new, "tie_word_embeddings", True), ("tie_embeddings", "True", "False")),
    "missing tensor": (
        lambda new: change(new, lambda tensors: tensors.pop("model.norm.weight")),
        ("lacks", "model.norm.weight"),
    ),
    "further tensor": (
        lambda new: change(new, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)})),
        ("has", "model.extra.weight"),
    ),
    "shape": (
        lambda new: change(new, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)})),
        ("model.norm.weight", "[2]"),
    ),
    "dtype": (
        lambda new: change(
            new, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].int()})
        ),
        ("model.norm.weight", "I32"),
    ),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_another_model_is_refused_with_both_values(pair: tuple[Path, Path], name: str) -> None:
    base, new = pair
    edit, words = DIFFERENCES[name]
    edit(new)
    with pytest.raises(ConfigError) as caught:
        check_swap(ServedModel.read(base), new)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("template", ["", "{{ bos_token }}", "{{ pad_token }}"])
def test_special_tokens_that_nothing_uses_may_differ(pair: tuple[Path, Path], template: str) -> None:
    for folder in pair:
        if template:
            (folder / "chat_template.jinja").write_text(template)
    base, new = pair
    (new / "tokenizer_config.json").write_text('{"pad_token": "<x>"}')
    if "pad_token" in template:
        with pytest.raises(ConfigError, match="pad_token"):
            check_swap(ServedModel.read(base), new)
    else:
        check_swap(ServedModel.read(base), new)


def test_another_order_of_inputs_is_refused(pair: tuple[Path, Path]) -> None:
    base, new = pair
    name, order = "model.layers.0.mlp.down_proj.g_idx", torch.arange(64, dtype=torch.int32) // 32
    for folder, given in ((base, order), (new, order.flip(0))):
        change(folder, lambda tensors, given=given: tensors.update({name: given}))  # type: ignore[misc]
    for one, other in ((base, new), (new, base)):
        with pytest.raises(ConfigError, match=rf"{name} .*act-order"):
            check_swap(ServedModel.read(one), other)


def test_kv_scales_may_come_and_go(pair: tuple[Path, Path]) -> None:
    base, new = pair
    change(base, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.tensor(0.5)}))
    check_swap(ServedModel.read(base), new)
    check_swap(ServedModel.read(new), base)


def make_socket(path: Path) -> None:
    # The path of a socket has at most 107 characters.
    with socket.socket(socket.AF_UNIX) as made:
        directory = os.open(path.parent, os.O_RDONLY)
        made.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to nothing": lambda path: path.symlink_to("nothing"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_everything_but_files_is_refused_by_name(pair: tuple[Path, Path], kind: str) -> None:
    base, new = pair
    (new / "additional_chat_templates").mkdir()
    names = ("model.safetensors", "other.safetensors", "config.json", "tokenizer_config.json", "chat_template.jinja")
    for name in (*names, "model.safetensors.index.json", "additional_chat_templates/tool_use.jinja"):
        path, kept = new / name, new / "kept"
        if path.exists():
            path.rename(kept)
        SPECIAL[kind](path)
        with pytest.raises(ConfigError) as caught:
            check_swap(ServedModel.read(base), new)
        assert str(path) in str(caught.value)
        with pytest.raises(ConfigError) as caught:  # Also if it has become one since it was listed.
            read_header(path)
        assert str(path) in str(caught.value)
        with pytest.raises(ConfigError) as caught, SourceFile(path):
            pass
        assert str(path) in str(caught.value)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        if kept.exists():
            kept.rename(path)
    check_swap(ServedModel.read(base), new)


def test_a_tensor_in_two_files_is_refused_with_both(pair: tuple[Path, Path]) -> None:
    base, new = pair
    tensors = load_file(new / "model.safetensors")
    (new / "model.safetensors").unlink()
    save_file(tensors, new / "one.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, new / "two.safetensors")
    weight_map = dict.fromkeys(tensors, "one.safetensors")
    index = new / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {"model.norm.weight": "two.safetensors"}}))
    with pytest.raises(ConfigError) as caught:
        check_swap(ServedModel.read(base), new)
    assert all(word in str(caught.value) for word in ("model.norm.weight", "one.safetensors", "two.safetensors"))


def test_a_process_whose_engine_is_gone_ends_quietly(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = pair
    (links := tmp_path / "links").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", PROGRAM, str(new), "", str(links)], **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(pickle.dumps(ServedModel.read(base)))
        process.stdin.close()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_an_error_of_a_parser_is_a_reason(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = pair
    monkeypatch.setattr(sys, "argv", ["", str(new), "", str(new)])
    monkeypatch.setattr(stage_checkpoint, "link_files", lambda *_: None)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(pickle.dumps(ServedModel.read(base)))))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(stage_checkpoint, "check_swap", Mock(side_effect=RecursionError("too deep")))
    disabled = logging.root.manager.disable
    assert stage_checkpoint.main() == 1
    logging.disable(disabled)
    assert capsys.readouterr().out == "RecursionError: too deep\n"


def test_files_that_were_replaced_by_others_of_the_same_size_and_time_have_changed(pair: tuple[Path, Path]) -> None:
    _, new = pair
    before = folder_stamp(new)
    shutil.copy2(new / "model.safetensors", new / "other")
    assert folder_stamp(new) == before
    (new / "other").rename(new / "model.safetensors")
    assert folder_stamp(new) != before


def staged(stager: ProcessStager, done: Event) -> str:
    assert done.wait(GUARD_SECONDS)
    result = stager.result()
    assert result is not None
    return result


def test_process_stages_a_checkpoint(pair: tuple[Path, Path]) -> None:
    base, new = pair
    done = Event()
    stager = ProcessStager(ServedModel.read(base), done.set)
    stager.start(str(new))
    assert staged(stager, done) == ""
    assert stager.progress() == 100
    stager.staged_folder(str(new))
    change(new, lambda tensors: tensors["model.norm.weight"].zero_())
    os.utime(new / "model.safetensors", ns=(1, 1))
    with pytest.raises(ConfigError):
        stager.staged_folder(str(new))


def test_a_checkpoint_is_compared_with_the_model_that_serves_and_not_with_what_its_files_say_now(
    pair: tuple[Path, Path],
) -> None:
    base, new = pair
    done = Event()
    stager = ProcessStager(ServedModel.read(base), done.set)
    set_field(base, "rms_norm_eps", 0.5)
    (base / "generation_config.json").write_text('{"temperature": 0.3}')
    stager.start(str(base))
    assert "rms_norm_eps is 0.5" in staged(stager, done)
    done.clear()
    stager.start(str(new))
    assert staged(stager, done) == ""


def test_a_broken_file_is_a_reason(pair: tuple[Path, Path]) -> None:
    base, new = pair
    done = Event()
    os.truncate(new / "model.safetensors", 100)
    stager = ProcessStager(ServedModel.read(base), done.set)
    stager.start(str(new))
    assert "model.safetensors" in staged(stager, done)


def test_a_killed_process_is_a_reason(pair: tuple[Path, Path]) -> None:
    base, new = pair
    done = Event()
    stager = ProcessStager(ServedModel.read(base), done.set)
    stager.start(str(new))
    assert stager.pid is not None
    os.kill(stager.pid, signal.SIGKILL)
    assert "-9" in staged(stager, done)


def test_the_end_of_a_cancelled_process_is_not_the_result_of_the_next(pair: tuple[Path, Path]) -> None:
    base, new = pair
    stager = ProcessStager(ServedModel.read(base), lambda: None)
    stager.start(str(new))
    first = stager._run
    stager.cancel()
    stager.start(str(new))
    assert first.process is not None and first.process.wait(GUARD_SECONDS)
    assert stager.result() is None
    stager.cancel()


def test_a_process_that_cannot_start_is_a_reason(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    base, new = pair
    stager = ProcessStager(ServedModel.read(base), lambda: None)
    monkeypatch.setattr(sys, "executable", str(base / "missing"))
    stager.start(str(new))
    assert "missing" in (stager.result() or "")


@pytest.mark.parametrize("name", ["generation_config.json", "model.safetensors", "additional_chat_templates/x.jinja"])
def test_files_outside_the_root_are_not_read(pair: tuple[Path, Path], name: str) -> None:
    base, new = pair
    (outside := base / "outside").write_text('{"secret": "hunter2"}')
    (new / name).parent.mkdir(exist_ok=True)
    (new / name).unlink(missing_ok=True)
    (new / name).symlink_to(outside)
    done = Event()
    stager = ProcessStager(ServedModel.read(base), done.set)
    stager.start(str(new), str(new))
    reason = staged(stager, done)
    assert str(new / name) in reason and "--swap-root" in reason and "hunter2" not in reason


def test_links_below_the_root_are_read_until_they_lead_elsewhere(pair: tuple[Path, Path]) -> None:
    base, new = pair
    (new / "model.safetensors").rename(new.parent / "blob")
    (new / "model.safetensors").symlink_to(new.parent / "blob")
    done = Event()
    stager = ProcessStager(ServedModel.read(base), done.set)
    stager.start(str(new), str(new.parent))
    assert staged(stager, done) == ""
    assert stager.staged_folder(str(new)) == new
    stager._root = str(new)
    with pytest.raises(ConfigError, match="--swap-root"):
        stager.staged_folder(str(new))


def test_what_was_opened_is_read_and_not_what_a_path_leads_to_by_then(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, new = pair
    (links := tmp_path / "links").mkdir()
    link_files(new, new, links)
    for path in new.iterdir():
        path.unlink()
        path.symlink_to(base / "config.json")
    assert list(read_through(links))[-1] == 100
    check_swap(ServedModel.read(base), links)


def test_only_fields_of_a_generation_config_that_differ_are_named(pair: tuple[Path, Path]) -> None:
    base, new = pair
    fields = {f"field_{index}": "x" * 50 for index in range(20)}
    (base / "generation_config.json").write_text(json.dumps(fields | {"top_k": 20, "top_p": 0.5}))
    (new / "generation_config.json").write_text(json.dumps(fields | {"top_k": 30, "min_p": 0.1}))
    with pytest.raises(ConfigError) as caught:
        check_swap(ServedModel.read(base), new)
    words = ("generation_config.json", "{'top_k': 30, 'min_p': 0.1}", "{'top_k': 20, 'top_p': 0.5}")
    assert all(word in str(caught.value) for word in words) and "field_" not in str(caught.value)
