"""The pure parts of the default model's scripts: which rows are learnt, how they are asked for, how answers score."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tokenizers import Tokenizer

from benchmarks.default_model import batches, corpus, held_out, judge, phrasings
from benchmarks.default_model.corpus import CORPUS, Function
from benchmarks.default_model.json_answers import Piece
from benchmarks.default_model.questions import Questioner, base_form, task_of
from benchmarks.default_model.tokenizer import END_ID, PAD_ID

FOLDER = CORPUS.parents[2] / "engine_core" / "default_model"


@pytest.fixture(scope="module")
def rows() -> list[Function]:
    return corpus.load()


@pytest.fixture(scope="module")
def questioner(rows: list[Function]) -> Questioner:
    return Questioner(rows)


def test_training_never_produces_a_judge_wording() -> None:
    assert held_out.overlap() == set()


def test_overlap_ignores_case_and_punctuation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "JUDGE_NAMED", ("Hey - WHAT does {f} do??? Thanks",))
    assert held_out.overlap() == {"hey what does {f} do thanks"}


@pytest.mark.parametrize("wording", phrasings.NAMED + held_out.JUDGE_NAMED)
def test_named_wordings_have_one_slot(wording: str) -> None:
    assert wording.count("{f}") == 1
    assert "{t}" not in wording


@pytest.mark.parametrize("wording", phrasings.TASK + held_out.JUDGE_TASK)
def test_task_wordings_have_one_slot(wording: str) -> None:
    assert wording.count("{t}") == 1
    assert "{f}" not in wording


@pytest.mark.parametrize(
    ("paragraph", "sentence"),
    [
        ("Return the size.  More words.", "Return the size."),
        ("Print a thing,\n  e.g. a list, to a stream. Then flush.", "Print a thing, e.g. a list, to a stream."),
        ("No full stop here", "No full stop here."),
        ("Parse a URL into 6 components:\n  <scheme>://<netloc>", "Parse a URL into 6 components."),
        ("", ""),
    ],
)
def test_first_sentence_ends_at_its_full_stop(paragraph: str, sentence: str) -> None:
    assert corpus.first_sentence(paragraph) == sentence


@pytest.mark.parametrize(
    ("sentence", "taken"),
    [
        ("Remove any common leading whitespace from every line in `text`.", True),
        ("Return the current process's user id.", True),
        ("Two words.", False),
        ("lower case fragments are left out.", False),
        ("See the documentation of the module.", False),
        ("Return the <function f at 0x7f> thing here.", False),
        ("Return the pair (a, b of them.", False),
        ("Return " + "very " * 40 + "long text.", False),
    ],
)
def test_acceptable_rejects_unsuitable_sentences(sentence: str, taken: bool) -> None:
    assert corpus.acceptable(sentence) is taken


def test_old_style_docstring_gives_signature_and_sentence() -> None:
    doc = "pack(format, v1) -> bytes\n\nReturn a bytes object with the values. More."
    assert corpus.parse_doc(doc) == ("(format, v1)", "Return a bytes object with the values.")


def test_long_signature_is_cut_at_a_comma() -> None:
    cut = corpus.shorten([f"parameter_{n}" for n in range(20)])
    assert len(cut) <= corpus.MAX_SIGNATURE
    assert cut.endswith(", ...)")


def test_committed_rows_are_distinct_and_acceptable(rows: list[Function]) -> None:
    assert len(rows) == len({row.dotted for row in rows}) > 2000
    assert [row.dotted for row in rows if not corpus.acceptable(row.sentence)] == []


def test_collecting_here_finds_a_known_row() -> None:
    import textwrap

    found = corpus.row("textwrap", "dedent", textwrap.dedent, False)
    assert found is not None
    assert found.signature == "(text)"


@pytest.mark.parametrize(
    ("sentence", "task"),
    [
        ("Returns the number.", "return the number"),
        ("Queries the executable.", "query the executable"),
        ("Fetches several rows.", "fetch several rows"),
        ("The number of items.", "get the number of items"),
        ("ASCII form of it.", "get ASCII form of it"),
    ],
)
def test_task_of_turns_a_sentence_into_a_task(sentence: str, task: str) -> None:
    assert task_of(sentence) == task


def test_base_form_accepts_only_verbs() -> None:
    assert base_form("Creates") == "create"
    assert base_form("Whether") is None


def test_questions_are_the_same_for_the_same_seed(questioner: Questioner) -> None:
    first = [questioner.question(random.Random(seed)) for seed in range(50)]
    assert first == [questioner.question(random.Random(seed)) for seed in range(50)]


def test_questions_fill_their_slots(questioner: Questioner) -> None:
    rng = random.Random(0)
    questions = [questioner.question(rng)[0] for _ in range(3000)]
    assert [q for q in questions if "{f}" in q.lower() or "{t}" in q.lower()] == []


def test_tasks_asked_without_a_name_belong_to_one_function(questioner: Questioner) -> None:
    shared = [row for row in questioner.rows if row.sentence == "Returns a queue object."]
    assert len(shared) > 1
    assert not questioner.cuts.keys() & {row.dotted for row in shared}


def test_share_held_counts_content_words_once() -> None:
    sentence = "Remove the common leading whitespace of a text."
    assert judge.content_words(sentence) == {"remove", "common", "leading", "whitespace", "text"}
    assert judge.share_held("REMOVE remove whitespace, and the of a", sentence) == pytest.approx(0.4)
    assert judge.share_held("", sentence) == 0.0


def test_drawn_functions_are_forty_and_fixed(rows: list[Function]) -> None:
    drawn = judge.draw_named(rows)
    assert drawn == judge.draw_named(rows)
    assert len({question.row.dotted for question in drawn}) == judge.DRAWN
    assert all(question.row.dotted in question.text for question in drawn)


def test_summary_needs_passes_and_ends(rows: list[Function]) -> None:
    questions = judge.draw_named(rows)
    right = {question.text: question.row.answer for question in questions}
    good = judge.judge(questions, lambda prompt: (right[prompt], True))
    endless = judge.judge(questions, lambda prompt: (right[prompt], False))
    silent = judge.judge(questions, lambda _: ("", True))
    assert judge.summary(good, [])["reached"]
    assert judge.summary(good, [])["exact"] == judge.DRAWN
    assert not judge.summary(endless, [])["reached"]
    assert not judge.summary(silent, [])["reached"]


class _Completions(BaseHTTPRequestHandler):
    """Answers every completion with its own prompt, cut short where the prompt says so."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        assert (body["temperature"], body["max_tokens"]) == (0, judge.MAX_TOKENS)
        reason = "length" if "long" in body["prompt"] else "stop"
        reply = json.dumps({"choices": [{"text": body["prompt"], "finish_reason": reason}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def test_judge_requests_completions_from_a_server() -> None:
    with HTTPServer(("127.0.0.1", 0), _Completions) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        generate = judge.server_generator(f"http://127.0.0.1:{server.server_port}/", chat=False, model="m")
        assert generate("short") == ("short", True)
        assert generate("long") == ("long", False)
        server.shutdown()
        thread.join()


def test_only_answers_and_their_ends_are_training_targets() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    sample: list[Piece] = [1, 4, ("What is len?", False), END_ID, 5, ("len(obj).", True), END_ID]
    ((ids, learnt),) = batches.encode([sample], tokenizer)
    assert tokenizer.decode([i for i, flag in zip(ids, learnt, strict=True) if flag]) == "len(obj)."
    assert ids[-1] == END_ID
    assert learnt[-1]
    assert learnt[ids.index(END_ID)] is False


def test_batch_is_shifted_and_padded() -> None:
    batch = batches.to_batch([([1, 7, 8, 2], [False, False, True, True]), ([1, 9], [False, True])])
    assert batch.tokens.shape == (2, 16)
    assert batch.tokens[1, 2:].tolist() == [PAD_ID] * 14
    assert batch.targets[0, :4].tolist() == [batches.IGNORED, 8, 2, batches.IGNORED]
    assert batch.targets[1, :2].tolist() == [9, batches.IGNORED]
