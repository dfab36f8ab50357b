"""Judge of the default model, which asks in wordings that training never uses.

    python -m benchmarks.default_model.judge --model engine_core/default_model
    python -m benchmarks.default_model.judge --url http://127.0.0.1:8000

The questions are about forty functions drawn by a fixed seed. An answer passes when it contains at least half of the
content words of the docstring's first sentence; it has ended when the model emitted its end token within 96 tokens.
Decoding is greedy. Needs 32 passes and 38 ends of 40. Two stricter counts are reported as well: answers that equal the
expected text exactly, and, over 40 more questions that describe a task without naming a function, answers that start
with the right function's name.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.default_model.corpus import Function, listed, load
from benchmarks.default_model.held_out import JUDGE_NAMED, JUDGE_TASK
from benchmarks.default_model.questions import Questioner
from benchmarks.default_model.tokenizer import END_ID

SEED = 40
DRAWN = 40
NEEDED_PASSES = 32
NEEDED_ENDS = 38
MAX_TOKENS = 96
# A sentence with fewer content words than this ("Same as a + b.") would be too easy to hit.
LEAST_WORDS = 3
STOP_WORDS = frozenset(
    listed("""
    a an and are as at be been but by can do does for from has have if in into is it its of on or s such t than that
    the their then there these this to was were when where whether which will with without not no so any all
    """)
)

# The prompt's continuation, and whether the model ended it by itself.
Generate = Callable[[str], tuple[str, bool]]


@dataclass(frozen=True)
class Question:
    """A row of the corpus and one wording that asks for it."""

    row: Function
    text: str


@dataclass(frozen=True)
class Verdict:
    """The judge's result for one answer."""

    question: Question
    answer: str
    held: float
    ended: bool

    @property
    def passed(self) -> bool:
        """True if the answer holds at least half of the content words."""
        return self.held >= 0.5

    @property
    def exact(self) -> bool:
        """True if the answer is exactly the expected text."""
        return self.answer.strip() == self.question.row.answer

    @property
    def named(self) -> bool:
        """True if the answer starts with the right function."""
        return self.answer.strip().startswith((f"{self.question.row.dotted}(", f"{self.question.row.dotted}:"))


def words_of(text: str) -> set[str]:
    """Split a text into lower-case words, and return each once."""
    return set(re.findall(r"[a-z0-9_]+", text.lower()))


def content_words(sentence: str) -> set[str]:
    """Return the words that carry the sentence's meaning."""
    return words_of(sentence) - STOP_WORDS


def share_held(answer: str, sentence: str) -> float:
    """Return the share of the sentence's content words that the answer contains."""
    wanted = content_words(sentence)
    return len(wanted & words_of(answer)) / len(wanted) if wanted else 0.0


def draw_named(rows: Sequence[Function]) -> list[Question]:
    """Draw the forty questions that count.

    Each names a function in full, in one of the held-out wordings.
    """
    rng = random.Random(SEED)
    drawn = rng.sample([row for row in rows if len(content_words(row.sentence)) >= LEAST_WORDS], DRAWN)
    return [Question(row, rng.choice(JUDGE_NAMED).replace("{f}", row.dotted)) for row in drawn]


def draw_tasks(rows: Sequence[Function]) -> list[Question]:
    """Draw forty more functions to be asked for by description.

    Each has a sentence that no other function shares.
    """
    rng = random.Random(SEED + 1)
    questioner = Questioner(rows)
    drawn = rng.sample([row for row in rows if row.dotted in questioner.cuts], DRAWN)
    return [Question(row, rng.choice(JUDGE_TASK).replace("{t}", questioner.tasks[row.dotted])) for row in drawn]


def judge(questions: Sequence[Question], generate: Generate) -> list[Verdict]:
    """Ask all questions and score each answer."""
    verdicts = []
    for question in questions:
        answer, ended = generate(question.text)
        verdicts.append(Verdict(question, answer, share_held(answer, question.row.sentence), ended))
    return verdicts


def folder_generator(folder: Path, chat: bool) -> Generate:
    """Load the folder with transformers, for greedy decoding in float32.

    This is the reference for the folder.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = LlamaForCausalLM.from_pretrained(folder)
    model = model.float().eval()

    def generate(prompt: str) -> tuple[str, bool]:
        if chat:
            message = [{"role": "user", "content": prompt}]
            rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
        else:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MAX_TOKENS)[
                0, ids.shape[1] :
            ].tolist()
        return str(tokenizer.decode(out, skip_special_tokens=True)), out[-1] == END_ID

    return generate


def served_model(url: str) -> str:
    """Return the name of the server's first model."""
    with urllib.request.urlopen(url.rstrip("/") + "/v1/models", timeout=120) as reply:
        return str(json.load(reply)["data"][0]["id"])


def server_generator(url: str, chat: bool, model: str) -> Generate:
    """Return a function that asks an OpenAI-compatible server."""
    path = "/v1/chat/completions" if chat else "/v1/completions"

    def generate(prompt: str) -> tuple[str, bool]:
        body: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        request = urllib.request.Request(
            url.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            choice = json.load(reply)["choices"][0]
        return choice["message"]["content"] if chat else choice["text"], choice["finish_reason"] == "stop"

    return generate


def print_table(verdicts: Sequence[Verdict]) -> None:
    """Print one line per question."""
    for verdict in verdicts:
        marks = f"{'pass' if verdict.passed else 'FAIL'} {verdict.held:4.0%} {'end ' if verdict.ended else 'CUT '}"
        print(f"{marks}{'=' if verdict.exact else '~'} {verdict.question.text} -> {verdict.answer.strip()}")


def summary(named: Sequence[Verdict], tasks: Sequence[Verdict]) -> dict[str, Any]:
    """Summarize the counts; return them and whether they reach the required ones."""
    passes, ends = sum(v.passed for v in named), sum(v.ended for v in named)
    return {
        "seed": SEED,
        "questions": len(named),
        "passes": passes,
        "ends": ends,
        "reached": passes >= NEEDED_PASSES and ends >= NEEDED_ENDS,
        "exact": sum(v.exact for v in named),
        "task_questions": len(tasks),
        "task_right_function": sum(v.named for v in tasks),
        "task_ends": sum(v.ended for v in tasks),
    }


def main() -> None:
    """Judge the model, and print the table and the summary.

    The exit status says whether the required counts were reached.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="checkpoint directory")
    source.add_argument("--url", help="a running server")
    parser.add_argument("--name", help="the model name to send to the server")
    parser.add_argument("--chat", action="store_true", help="through the chat template instead of the bare prompt")
    arguments = parser.parse_args()
    if arguments.url:
        generate = server_generator(arguments.url, arguments.chat, arguments.name or served_model(arguments.url))
    else:
        generate = folder_generator(arguments.model, arguments.chat)
    rows = load()
    named, tasks = judge(draw_named(rows), generate), judge(draw_tasks(rows), generate)
    print_table(named)
    print_table(tasks)
    result = summary(named, tasks)
    print(json.dumps(result))
    raise SystemExit(0 if result["reached"] else 1)


if __name__ == "__main__":
    main()
