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
from benchmarks.default_model.tool_use import ToolUser

VOCABULARY = 4096
CONTEXT = 2048
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = [PAD, BEGIN, END, SYSTEM, USER, ASSISTANT]
PAD_ID, BEGIN_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL))

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
  {{- '<|system|>Tools:' -}}
  {%- for tool in tools -%}
    {%- set function = tool['function'] -%}
    {{- '\\n' + function['name'] + '(' -}}
    {%- set parameters = function['parameters'] or {} -%}
    {%- for name, schema in (parameters['properties'] or {}).items() -%}
      {{- (', ' if not loop.first else '') + name + ': ' -}}
      {%- if schema is mapping and schema['enum'] -%}
        {{- schema['enum'] | join('|') -}}
      {%- elif schema is mapping and schema['type'] is string -%}
        {{- schema['type'] -}}
      {%- else -%}
        {{- 'any' -}}
      {%- endif -%}
    {%- endfor -%}
    {{- ')' + (': ' + function['description'] | trim if function['description'] else '') -}}
  {%- endfor -%}
  {{- eos_token -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message['content'] is string -%}
    {%- set text = message['content'] -%}
  {%- else -%}
    {%- set parts = message['content'] or [] -%}
    {%- set text = parts | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') -%}
  {%- endif -%}
  {%- if message['role'] == 'assistant' -%}
    {{- '<|assistant|>' -}}
  {%- elif message['role'] in ('system', 'developer') -%}
    {{- '<|system|>' -}}
  {%- else -%}
    {{- '<|user|>' -}}
  {%- endif -%}
  {{- ('Result:\\n' if message['role'] == 'tool' else '') + text | trim -}}
  {%- for call in message['tool_calls'] or [] -%}
    {%- set arguments = call['function']['arguments'] -%}
    {{- '; ' if not loop.first else '' -}}
    {{- '{"name": "' + call['function']['name'] + '", "parameters": ' -}}
    {{- (arguments if arguments is string else arguments | tojson) + '}' -}}
  {%- endfor -%}
  {{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""


def sample_texts(questioner: Questioner, seed: int, count: int) -> Iterator[str]:
    """Yield all answers, questions in training wordings, and some lists of tools.

    Frequent names thus stay whole. JSON is not among them: quotes and braces remain tokens of their own.
    """
    rng = random.Random(seed)
    for row in questioner.rows:
        yield row.answer
        yield f" {row.answer}"
    for _ in range(count):
        yield questioner.question(rng)[0]
    user = ToolUser(questioner)
    for _ in range(count // 10):
        use = user.use(rng)
        yield from (tool.line for tool in use.tools)
        yield use.question


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
