"""Tokenizers with more tokens than the model has logits for."""

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from tandem.engine_core.constraints.grammars import Grammars
from tandem.engine_core.constraints.mask_builder import MaskBuilder
from tandem.engine_core.constraints.tokenizer_file import tokenizer_source
from tandem.engine_core.startup.engine import DEFAULT_MODEL
from tandem.engine_core.stats import new_stats
from tests.fakes.clock import FakeClock
from tests.support.grammar_walks import allowed_tokens

FILE = DEFAULT_MODEL / "tokenizer.json"
SIZE = 4096
END = 2
GRAMMARS = {
    "regex": LLMatcher.grammar_from_regex("[a-z ]{1,40}"),
    "choice": LLMatcher.grammar_from_lark('start: "yes please" | "no thanks"'),
    "json": LLMatcher.grammar_from_json_schema({"type": "object"}),
    "schema": LLMatcher.grammar_from_json_schema({"type": "array", "items": {"type": "string", "maxLength": 9}}),
    "lark": LLMatcher.grammar_from_lark("start: /(.|\\n)*/"),
    "forced": LLMatcher.grammar_from_regex("There is exactly one way to say this"),
}


def added(token_id: int, content: str, special: bool = True) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, "special": special, **flags}


def with_added(tmp_path: Path, *tokens: dict[str, Any]) -> Path:
    tokenizer = json.loads(FILE.read_bytes())
    tokenizer["added_tokens"] += tokens
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("vocab_size", [SIZE - 1, 4000, 3999, 1024])
def test_ids_beyond_the_vocabulary_are_never_allowed(name: str, vocab_size: int) -> None:
    grammars, random = Grammars(FILE, vocab_size, (END, vocab_size + 3)), Random(7)
    assert (grammars.prepare().vocab_size, grammars.prepare().eos_tokens) == (vocab_size, [END])
    constraint = grammars.compile(GRAMMARS[name]).constraint(ignore_ends=False)
    builder = MaskBuilder([END], new_stats(), FakeClock())
    masks = np.full((1, -(-vocab_size // 32)), -1, dtype=np.int32)
    for _ in range(40):
        builder.fill([(constraint, 0)], masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        assert len(allowed) > 0 and allowed.max() < vocab_size
        assert all(token < vocab_size for token in constraint.fast_forward_tokens())
        token = int(random.choice(allowed))
        assert constraint.accept(token), constraint.problem
        if constraint.is_complete:
            break


def test_masks_are_those_of_the_whole_tokenizer_without_the_ids_beyond() -> None:
    whole, cut = Grammars(FILE, SIZE, (END,)), Grammars(FILE, 3000, (END,))
    for grammar in GRAMMARS.values():
        one, other = whole.compile(grammar).first, cut.compile(grammar).first
        assert [token for token in allowed_tokens(one) if token < 3000] == allowed_tokens(other)


def test_one_added_token_more_than_the_model_has(tmp_path: Path) -> None:
    """As in Gemma 3 1B, which has no logit for its image token."""
    path = with_added(tmp_path, added(SIZE, "<image_soft_token>"), added(SIZE + 1, "plain", special=False))
    assert tokenizer_source(path, SIZE + 2) == str(path)
    grammars = Grammars(path, SIZE, (END,))
    first = grammars.compile(GRAMMARS["lark"]).first
    assert first.compute_bitmask() == Grammars(FILE, SIZE, (END,)).compile(GRAMMARS["lark"]).first.compute_bitmask()
    assert max(grammars.prepare().tokenize_str("a plain <image_soft_token>")) < SIZE


@pytest.mark.parametrize("is_pair", [True, False])
def test_merges_that_lead_beyond_the_vocabulary_are_dropped(tmp_path: Path, is_pair: bool) -> None:
    tokenizer = json.loads(FILE.read_bytes())
    if not is_pair:
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    cut = json.loads(tokenizer_source(path, 1000))
    assert max(cut["model"]["vocab"].values()) == 999
    assert 0 < len(cut["model"]["merges"]) < len(tokenizer["model"]["merges"])
    grammars = Grammars(path, 1000, (END,))
    assert grammars.prepare().decode_str(grammars.prepare().tokenize_str("There is one way")) == "There is one way"


def test_unigram_vocabulary_is_cut_by_index(tmp_path: Path) -> None:
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁yes", "▁no", "yes", "no", "beyond"]
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [added(0, "<unk>"), added(1, "</s>"), added(len(pieces), "<more>")],
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
        ]},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": [[piece, -1.0] for piece in pieces]},
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    vocab_size = len(pieces) - 1
    grammars = Grammars(path, vocab_size, (1,))
    allowed = allowed_tokens(grammars.compile(LLMatcher.grammar_from_regex("(yes|no|beyond)")).first)
    assert max(allowed) < vocab_size
    assert {pieces.index("yes"), pieces.index("no")} <= set(allowed)


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"model": {"vocab": {"a": "x"}}}'])
def test_files_that_are_no_tokenizers_are_left_to_the_library(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    assert tokenizer_source(path, 100) == str(path)
