"""Repositories of a fake hub, and models of it."""

import json
from pathlib import Path

from tandem.frontend.hub.client import HubModel
from tandem.frontend.hub.snapshot import Snapshot
from tests.fakes.hub_server import HubServer, Repository

NAME = "org/tiny"
SINGLE = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"t" * 3000,
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 100,
}
"""Files of a model in one file of weights; the tokenizer and the weights are large."""
SHARDS = {f"model-0000{number}-of-00002.safetensors": bytes([number]) * 5000 for number in (1, 2)}
SHARDED = {
    **{name: content for name, content in SINGLE.items() if name != "model.safetensors"},
    **SHARDS,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"t{number}": name for number, name in enumerate(SHARDS)}}
    ).encode(),
}
UNWANTED = {
    "README.md": b"# Tiny",
    ".gitattributes": b"*",
    "pytorch_model.bin": b"p" * 2000,
    "model.Q4_K_M.gguf": b"g" * 2000,
    "original/consolidated.00.pth": b"o" * 2000,
    "consolidated.safetensors": b"c" * 2000,
    "modeling_tiny.py": b"import os",
    "onnx/config.json": b"{}",
}
"""Files that serving needs none of, some of them code."""


def repository(files: dict[str, bytes] = SINGLE, **settings: object) -> Repository:
    return Repository(dict(files), **settings)  # type: ignore[arg-type]


def hub_model(
    hub: HubServer,
    cache: Path,
    name: str = NAME,
    revision: str = "main",
    token: str | None = None,
    offline: bool = False,
) -> HubModel:
    return HubModel(name, revision, hub.url, token, cache, offline)


def names_in(snapshot: Snapshot) -> set[str]:
    """Return the names of the files of a snapshot."""
    return {path.relative_to(snapshot.folder).as_posix() for path in snapshot.folder.rglob("*") if path.is_file()}
