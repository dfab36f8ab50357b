"""Byte-level BPE of the default model, trained on its questions and answers.

It is written as two files, tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from benchmarks.default_model.questions import Questioner

VOCABULARY = 4096
CONTEXT = 2048
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BEGIN, END, SYSTEM, USER, ASSISTANT]
PAD_ID, BEGIN_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL))

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['content'] is string -%}
    {%- set text = message['content'] -%}
  {%- else -%}
    {%- set text = message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') -%}
  {%- endif -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|assistant|>' -}}
  {%- elif message['role'] in ('system', 'developer') -%}
    {{- '<|system|>' -}}
  {%- else -%}
    {{- '<|user|>' -}}
  {%- endif -%}
  {{- text | trim + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def sample_texts(questioner: Questioner, seed: int, count: int) -> Iterator[str]:
    """Yield all answers, and questions in training wordings.

    Frequent names thus stay whole.
    """
    rng = random.Random(seed)
    for row in questioner.rows:
        yield row.answer
        yield f" {row.answer}"
    for _ in range(count):
        yield questioner.question(rng)[0]


def train_tokenizer(questioner: Questioner, seed: int, count: int = 40_000) -> Tokenizer:
    """Train the BPE, with its special tokens first.

    Encoding puts `<|begin|>` before a text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_texts(questioner, seed, count), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    transformers and serving engines read these files.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
