"""Token batches for training, in the same order on every run.

Other processes make them ahead of time, from numbered seeds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.default_model.corpus import load
from benchmarks.default_model.json_answers import (
    INSTRUCTIONS,
    Piece,
    call_of,
    forced_call,
    forced_open,
    json_about,
    json_facts,
    json_pieces,
    json_result,
)
from benchmarks.default_model.questions import Questioner
from benchmarks.default_model.tokenizer import ASSISTANT_ID, BEGIN_ID, END_ID, PAD_ID, SYSTEM_ID, USER_ID
from benchmarks.default_model.tool_use import ToolUser, result_of
from tandem.engine_core.integers import ceil_div

IGNORED = -100
LONGEST = 384
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "You answer questions about Python's standard library.",
    "Answer in one sentence.",
    "Be brief.",
    "You are Tandem.",
    "Use the supplied tools to assist the user.",
    "You are a helpful assistant with access to tools.",
    "Call a tool when you need one.",
)
# (weight, before the question, after it, whether a space opens the answer)
RAW_FORMS = (
    (50, "", "", True),
    (12, "", "\n", False),
    (6, "", "\n\n", False),
    (6, "", " ", False),
    (3, "Q: ", "", True),
    (3, "Q: ", "\n", False),
    (10, "Q: ", "\nA:", True),
    (6, "Question: ", "\nAnswer:", True),
    (4, "User: ", "\nAssistant:", True),
)


# Percentages of plain chats, bare questions, answers in JSON and requests with tools.
SHARES = (28, 41, 12, 19)


@dataclass(frozen=True)
class Batch:
    """Tokens and the next token to learn at each of them.

    A target is IGNORED where the next token is not part of an answer.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]


def chat_sample(rng: random.Random, questioner: Questioner) -> list[Piece]:
    """Render one to four turns with the chat template.

    Some samples begin with a system prompt.
    """
    pieces: list[Piece] = [BEGIN_ID, *_system(rng, questioner.fillers)]
    for _ in range(rng.choices((1, 2, 3, 4), (80, 12, 5, 3))[0]):
        question, answer = questioner.question(rng)
        pieces += [*_turn(question), (answer, True), END_ID]
    return pieces


def raw_sample(rng: random.Random, questioner: Questioner) -> list[Piece]:
    """Write a question as bare text, mostly after `<|begin|>`, and its answer."""
    _, before, after, spaced = rng.choices(RAW_FORMS, [form[0] for form in RAW_FORMS])[0]
    question, answer = questioner.question(rng)
    pieces: list[Piece] = [(f"{before}{question}{after}", False), (" " + answer if spaced else answer, True), END_ID]
    return pieces if rng.random() < 0.15 else [BEGIN_ID, *pieces]


def json_sample(rng: random.Random, questioner: Questioner) -> list[Piece]:
    """Write a question and the JSON object that answers it, mostly with the chat template.

    The object's keys are learnt only where the question is to be answered in JSON without a schema.
    """
    if rng.random() < 0.2:
        question, answer = json_facts(rng)
        free = False
    else:
        question, row = questioner.asked(rng)
        free = rng.random() < 0.2
        answer = {"answer": row.answer} if free else json_about(rng, row)
    if free or rng.random() < 0.12:
        question = f"{question.strip()} {rng.choice(INSTRUCTIONS)}"
    written = forced_open(json_pieces(rng, answer, free))
    if rng.random() < 0.2:
        return [BEGIN_ID, (f"{question}{rng.choice(('', '', chr(10), ' '))}", False), *written, END_ID]
    before = [*_system(rng, questioner.fillers), *_earlier(rng, questioner)]
    return [BEGIN_ID, *before, *_turn(question), *written, END_ID]


def tool_sample(rng: random.Random, user: ToolUser) -> list[Piece]:
    """Render a request with tools and the call or the answer.

    Some go on with the call's result and its answer, in text or in the JSON of a schema.
    """
    use = user.use(rng)
    tools = "\n".join(["Tools:", *(tool.line for tool in use.tools)])
    pieces: list[Piece] = [BEGIN_ID, SYSTEM_ID, (tools, False), END_ID, *_system(rng, user.questioner.fillers)]
    pieces += [*_earlier(rng, user.questioner), *_turn(use.question)]
    if use.tool is None:
        return [*pieces, (use.answer, True), END_ID]
    call = json_pieces(rng, call_of(use), True)
    if use.forced or rng.random() < 0.75:
        return [*pieces, *(forced_call(call) if use.forced else call), END_ID]
    result, told = result_of(rng, use.tool, user.questioner)
    before = (json.dumps(call_of(use), ensure_ascii=False), False)
    pieces += [before, END_ID, *_turn(f"Result:\n{result}")]
    if rng.random() < 0.35:
        # With a schema and tools a grammar allows its object or another call: the keys are learnt to tell them apart.
        return [*pieces, *forced_open(json_pieces(rng, json_result(rng, told, use.arguments), True)), END_ID]
    return [*pieces, (told, True), END_ID]


def _system(rng: random.Random, fillers: list[str]) -> list[Piece]:
    """Write a system prompt, sometimes of random words, or mostly none."""
    if rng.random() < 0.75:
        return []
    words = [rng.choice(fillers) for _ in range(rng.randrange(3, 16))]
    prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.7 else " ".join(words).capitalize() + "."
    return [SYSTEM_ID, (prompt, False), END_ID]


def _earlier(rng: random.Random, questioner: Questioner) -> list[Piece]:
    """Write a turn with an answer in text, or mostly none."""
    if rng.random() < 0.9:
        return []
    question, answer = questioner.question(rng)
    return [*_turn(question), (answer, True), END_ID]


def _turn(text: str) -> list[Piece]:
    """Write a message of the user and the start of the answer."""
    return [USER_ID, (text.strip(), False), END_ID, ASSISTANT_ID]


def encode(samples: list[list[Piece]], tokenizer: Tokenizer) -> list[tuple[list[int], list[bool]]]:
    """Encode samples, and mark for each id whether it is a training target.

    Targets are the answers and the end token after them.
    """
    texts = [piece[0] for sample in samples for piece in sample if not isinstance(piece, int)]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
    result = []
    for sample in samples:
        ids: list[int] = []
        learnt: list[bool] = []
        after_answer = False
        for piece in sample:
            if isinstance(piece, int):
                ids.append(piece)
                learnt.append(after_answer and piece == END_ID)
                after_answer = False
            else:
                part = next(encoded).ids
                ids += part
                learnt += [piece[1]] * len(part)
                after_answer = piece[1]
        result.append((ids[:LONGEST], learnt[:LONGEST]))
    return result


def to_batch(samples: list[tuple[list[int], list[bool]]]) -> Batch:
    """Pad samples on the right to one length, a multiple of 16.

    Causal attention never looks at the padding.
    """
    length = ceil_div(max(len(ids) for ids, _ in samples), 16) * 16
    tokens = np.full((len(samples), length), PAD_ID, dtype=np.int64)
    targets = np.full((len(samples), length), IGNORED, dtype=np.int64)
    for line, (ids, learnt) in enumerate(samples):
        tokens[line, : len(ids)] = ids
        targets[line, : len(ids) - 1] = np.where(learnt[1:], ids[1:], IGNORED)
    return Batch(tokens, targets)


def make_samples(rng: random.Random, questioner: Questioner, count: int) -> list[list[Piece]]:
    """Make samples of all forms in the shares that the model trains on."""
    user = ToolUser(questioner)
    makers: tuple[Callable[[], list[Piece]], ...] = (
        lambda: chat_sample(rng, questioner),
        lambda: raw_sample(rng, questioner),
        lambda: json_sample(rng, questioner),
        lambda: tool_sample(rng, user),
    )
    return [maker() for maker in rng.choices(makers, SHARES, k=count)]


_worker: tuple[Questioner, Tokenizer] | None = None


def _start_worker(tokenizer_file: str) -> None:
    """Prepare a worker process, which uses one core.

    It reads the corpus and the tokenizer once.
    """
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = Questioner(load()), Tokenizer.from_file(tokenizer_file)


def _make_shard(job: tuple[int, int, int, int]) -> list[Batch]:
    """Make the batches of one shard.

    Samples of similar length are grouped to avoid padding.
    """
    seed, index, rows, count = job
    assert _worker is not None, "the pool starts each process with _start_worker"
    questioner, tokenizer = _worker
    rng = random.Random(f"{seed}/{index}")
    samples = make_samples(rng, questioner, rows * count)
    encoded = sorted(encode(samples, tokenizer), key=lambda sample: len(sample[0]))
    batches = [to_batch(encoded[start : start + rows]) for start in range(0, len(encoded), rows)]
    rng.shuffle(batches)
    return batches


def stream(tokenizer_file: Path, seed: int, steps: int, rows: int, processes: int) -> Iterator[Batch]:
    """Yield `steps` batches of `rows` samples.

    A shard holds 16 batches, however many processes make them.
    """
    per_shard = 16
    jobs = [(seed, index, rows, per_shard) for index in range(ceil_div(steps, per_shard))]
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start_worker, (str(tokenizer_file),)) as pool:
        made = 0
        for shard in pool.imap(_make_shard, jobs):
            for batch in shard:
                if made < steps:
                    made += 1
                    yield batch
