"""Engines whose tokens a benchmark chooses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import json

from tandem.engine_core.errors import ConfigError
from tandem.protocol.params import SamplingParams
from tests.engine_core.runtime.test_recorded_graphs import MODEL
from tests.engine_core.runtime.test_speculation import KINDS, build
from tests.support.model_folder import write_model
from tests.support.tiny_llama import VOCAB

RANDOM = SamplingParams(40, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, MODEL)
    return path


@pytest.fixture
def teacher(tmp_path: Path) -> Callable[[list[int]], dict[str, Any]]:
    def options(tokens: list[int]) -> dict[str, Any]:
        path = tmp_path / "tokens.json"
        path.write_bytes(json.encode(tokens))
        return {"developer": "on", "teacher_tokens": str(path)}

    return options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculate", ["off", "ngram"])
def test_requests_generate_the_text_of_a_teacher(
    kind: str, speculate: str, folder: Path, teacher: Callable[[list[int]], dict[str, Any]]
) -> None:
    """And drafts are accepted where the text repeats: it quotes the prompt."""
    text = [5, 6, 7, 8, 9, 10, 11, 12] * 3
    with KINDS[kind].kernels():
        driven = build(folder, KINDS[kind], speculate=speculate, **teacher(text))
        found = driven.generate([text[:9], [3]], [RANDOM, RANDOM])
    assert [tokens[: len(text)] for tokens in found] == [text, text]
    assert len(set(map(tuple, found))) == 2, "what follows is sampled"
    accepted = driven.engine.stats.spec_decode_num_accepted_tokens
    assert accepted > 10 if speculate == "ngram" else accepted == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("acceptance", "least", "most"), [(0.0, 0.0, 0.2), (0.6, 0.4, 0.8), (1.0, 1.0, 1.0)])
def test_drafts_are_right_with_the_given_probability(
    kind: str, acceptance: float, least: float, most: float, folder: Path
) -> None:
    """Counted over the first draft of each step, since a wrong one ends its run."""
    options = {"speculate": "ngram", "speculate_tokens": 1, "developer": "on", "synthetic_acceptance": acceptance}
    with KINDS[kind].kernels():
        driven = build(folder, KINDS[kind], **options)
        found = driven.generate([[number, 3] for number in range(4)], [RANDOM] * 4)
    stats = driven.engine.stats
    assert [len(tokens) for tokens in found] == [40] * 4
    share = stats.spec_decode_num_accepted_tokens / max(1, stats.spec_decode_num_draft_tokens)
    assert least <= share <= most
    assert driven.engine.scheduler.audit() == []


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"synthetic_acceptance": 0.5, "speculate": "ngram"}, ("--synthetic-acceptance 0.5", "--developer")),
        ({"teacher_tokens": "x.json"}, ("--teacher-tokens x.json", "--developer")),
        ({"synthetic_acceptance": 0.5, "developer": "on"}, ("--synthetic-acceptance 0.5", "--speculate off")),
    ],
)
def test_flags_of_benchmarks_are_refused_alone(options: dict[str, Any], flags: tuple[str, str], folder: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        build(folder, KINDS["cpu"], **options)
    assert all(flag in str(refused.value) for flag in flags)


@pytest.mark.parametrize("content", ['{"a": 1}', "[1, -1]", f"[{VOCAB}]", "[1.5]", "no json"])
def test_a_text_that_is_no_list_of_token_ids_is_refused(content: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--teacher-tokens {path}"):
        build(folder, KINDS["cpu"], developer="on", teacher_tokens=str(path))


def test_a_text_that_is_missing_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--teacher-tokens /nowhere"):
        build(folder, KINDS["cpu"], developer="on", teacher_tokens="/nowhere")
