"""Draft models that are refused, and the memory of one that is not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from safetensors.torch import load_file, save_file

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.startup.engine import resolve_engine
from tandem.engine_core.startup.preflight import preflight
from tandem.protocol.engine_options import EngineOptions
from tests.support.engine_driver import DrivenEngine
from tests.support.model_folder import write_config, write_model
from tests.support.tiny_llama import CONFIG


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        folder.mkdir()
        write_model(folder)
    return target, draft


def resolve(target: Path, draft: Path, **options: Any) -> Any:
    sizes: dict[str, Any] = {"max_len": 64, "kv_tokens": 512, "max_rows": 4}
    asked = EngineOptions(model=str(target), device="cpu", speculate=f"model:{draft}", **sizes | options)
    return resolve_engine(asked, cuda=False)


def tokenizer(folder: Path, vocab: Any, *added: tuple[str, int]) -> None:
    tokens = [{"id": number, "content": content} for content, number in added]
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode({"model": {"vocab": vocab}, "added_tokens": tokens}))


def test_its_memory_is_that_of_its_own_layers(folders: tuple[Path, Path]) -> None:
    source = resolve(*folders).source
    assert source.draft is not None and source.draft.directory == folders[1]
    assert source.token_bytes == 2 * source.layout.token_bytes, "the same model twice"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_position_embeddings": 32}, "32.*--max-len is 64"),
        ({"architectures": ["BertModel"]}, "BertModel"),
    ],
)
def test_another_length_or_architecture_is_refused(
    change: dict[str, Any], named: str, folders: tuple[Path, Path]
) -> None:
    write_config(folders[1], CONFIG, **change)
    with pytest.raises(ConfigError, match=rf"(?s)--speculate model:.*{named}"):
        resolve(*folders)


WINDOWS = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}


def test_windows_of_the_model_are_refused_if_they_give_up_pages(folders: tuple[Path, Path]) -> None:
    write_config(folders[0], CONFIG, **WINDOWS)
    with pytest.raises(ConfigError, match=r"--speculate model:.*windows.*--page-size max"):
        resolve(*folders)
    assert resolve(*folders, page_size="max").source.draft is not None


def test_a_draft_model_with_windows_keeps_all_positions(folders: tuple[Path, Path]) -> None:
    write_config(folders[1], CONFIG, **WINDOWS)
    source = resolve(*folders).source
    assert source.draft is not None and [group.window for group in source.draft.layout.groups] == [None]
    assert source.token_bytes == 2 * source.layout.token_bytes


def test_a_folder_that_is_missing_is_named(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="--speculate model:/nowhere"):
        resolve(folders[0], Path("/nowhere"))


@pytest.mark.parametrize(
    ("vocab", "added"), [({"a": 0, "b": 2}, ()), ({"a": 0}, ()), ({"a": 0, "b": 1}, (("<end>", 7),))]
)
def test_another_tokenizer_is_refused(
    vocab: dict[str, int], added: tuple[tuple[str, int], ...], folders: tuple[Path, Path]
) -> None:
    tokenizer(folders[0], {"a": 0, "b": 1})
    tokenizer(folders[1], vocab, *added)
    with pytest.raises(ConfigError, match=r"--speculate model:.*tokenizer"):
        resolve(*folders)


def test_tokenizers_are_equal_if_their_ids_are(folders: tuple[Path, Path]) -> None:
    tokenizer(folders[0], {"b": 1, "a": 0}, ("<end>", 2))
    tokenizer(folders[1], [["a", -1.0], ["b", -2.0]], ("<end>", 2))
    assert resolve(*folders).source.draft is not None
    (folders[1] / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        resolve(*folders)


def test_vocabularies_of_other_sizes_are_padded_ones_if_the_tokenizers_agree(folders: tuple[Path, Path]) -> None:
    vocab = {str(number): number for number in range(CONFIG.vocab_size)}
    write_config(folders[1], CONFIG, vocab_size=CONFIG.vocab_size + 8)
    for folder in folders:
        tokenizer(folder, vocab)
    assert resolve(*folders).source.draft is not None
    assert resolve(folders[1], folders[0]).source.draft is not None
    for folder in folders:
        tokenizer(folder, vocab, ("<end>", CONFIG.vocab_size))
    with pytest.raises(
        ConfigError, match=rf"--speculate model:.*{CONFIG.vocab_size + 8} ids.*up to {CONFIG.vocab_size}"
    ):
        resolve(*folders)
    with pytest.raises(ConfigError, match=rf"--speculate model:.*{CONFIG.vocab_size} ids.*up to {CONFIG.vocab_size}"):
        resolve(folders[1], folders[0])


def test_without_a_tokenizer_the_vocabularies_must_have_one_size(folders: tuple[Path, Path]) -> None:
    for folder in folders:
        (folder / "tokenizer.json").unlink()
    assert resolve(*folders).source.draft is not None
    write_config(folders[1], CONFIG, vocab_size=CONFIG.vocab_size + 8)
    with pytest.raises(ConfigError, match=rf"--speculate model:.*{CONFIG.vocab_size + 8}.*tokenizer\.json"):
        resolve(*folders)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"\xff", b'{"model": {"vocab": [[]]}}', b'{"model": {"vocab": 3}}', b'{"model": []}']
)
def test_a_malformed_tokenizer_is_named(text: bytes, folders: tuple[Path, Path]) -> None:
    tokenizer(folders[0], {"a": 0})
    (folders[1] / "tokenizer.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"--speculate model:.*draft/tokenizer\.json"):
        resolve(*folders)


@pytest.mark.parametrize("damage", ["file", "tensor"])
def test_missing_weights_are_those_of_the_draft_model(damage: str, folders: tuple[Path, Path]) -> None:
    path = folders[1] / "model.safetensors"
    if damage == "file":
        path.unlink()
    else:
        save_file({name: tensor for name, tensor in load_file(path).items() if name != "model.norm.weight"}, path)
    sizes: dict[str, Any] = {"max_len": 64, "kv_tokens": 512, "max_rows": 4}
    options = EngineOptions(model=str(folders[0]), device="cpu", speculate=f"model:{folders[1]}", **sizes)
    with pytest.raises(ConfigError) as refused:
        DrivenEngine.build(options)
    [problem] = preflight(options, [], lambda: 2**34, lambda: 2**34).problems
    for text in (str(refused.value), problem):
        assert text.startswith(f"--speculate model:{folders[1]}: ")
        assert ("model.safetensors" if damage == "file" else "model.norm.weight") in text


def test_the_report_of_a_check_has_its_memory(folders: tuple[Path, Path]) -> None:
    options = EngineOptions(model=str(folders[0]), device="cpu", max_len=64, kv_tokens=512, max_rows=4)
    alone = preflight(options, [], lambda: 2**34, lambda: 2**34)
    both = preflight(structs.replace(options, speculate=f"model:{folders[1]}"), [], lambda: 2**34, lambda: 2**34)
    assert not both.problems and "draft model" in both.model and "draft model" not in alone.model
    assert f"{resolve(*folders).source.layout.token_bytes} bytes" in both.model["draft model"]


@pytest.mark.parametrize("tokens", [-1, 0, 8])
def test_a_number_of_drafts_outside_its_bounds_is_refused(tokens: int, folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=f"--speculate-tokens {tokens}: .*1 to 7"):
        resolve(*folders, speculate_tokens=tokens)
