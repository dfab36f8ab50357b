"""Tiny checkpoints for the tools that compare with transformers."""

from pathlib import Path

import pytest

from benchmarks.porting.tiny import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("LlamaForCausalLM", folder)
    return folder
