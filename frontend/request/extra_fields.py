"""Fields of OpenAI and other servers that this server does not support.

Fields that do not change the output are ignored; the others are refused, except for neutral values.
"""

from collections.abc import Iterable

from tandem.frontend.request.field_types import Ignored, Unsupported
from tandem.frontend.request.fields import IGNORED_FIELDS, Field

_ROUTING = "Chooses among providers or models; this server has one."
_TEXT_ONLY = "Prepares images, audio or video, which this server does not take."
_CACHE = "The KV cache of prompts is always on and manages its memory itself."
_BEAMS = "Only has a meaning for beam search."

NO_EFFECT_FIELDS = (
    Field("service_tier", Ignored(("auto", "default")), "One tier serves all requests; chats answer `default`."),
    Field("store", Ignored((False,)), "Completions and chats are not stored."),
    Field("request_id", Ignored(), "The header `x-request-id` names a request."),
    Field("rid", Ignored(), "The header `x-request-id` names a request."),
    *(Field(name, Ignored(), _ROUTING) for name in ("provider", "models", "route", "transforms", "plugins")),
    Field("usage", Ignored(), "Usage is reported as OpenAI reports it."),
    *(Field(name, Ignored(), _CACHE) for name in ("cache_prompt", "id_slot", "n_keep", "keep_alive")),
    Field("options", Ignored(), "Ollama's own options, which its OpenAI routes ignore as well."),
    *(Field(name, Ignored(), _TEXT_ONLY) for name in ("mm_processor_kwargs", "media_io_kwargs")),
    Field("kv_transfer_params", Ignored(), "Moves KV between servers."),
    Field("client_metadata", Ignored(), "Facts about the client."),
    Field("vllm_xargs", Ignored(), "Arguments of vLLM's extensions."),
    Field("guided_decoding_backend", Ignored(), "There is one backend, llguidance."),
    Field("guided_whitespace_pattern", Ignored(), "White space is that of ordinary JSON."),
    Field("timings_per_token", Ignored((False,)), "Timings are in `/metrics`."),
    Field("return_progress", Ignored((False,)), "The progress of a prompt is not reported."),
    Field("length_penalty", Ignored((1, 1.0)), _BEAMS),
    Field("early_stopping", Ignored((False,)), _BEAMS),
)
"""Ignored fields of generating routes. Their accepted values are not reported as ignored."""

ANTHROPIC_FIELDS = (
    Field("context_management", Ignored(), "No part of a conversation is cleared; what is sent is rendered."),
    Field("container", Ignored(), "No code runs in this server."),
    Field("service_tier", Ignored(("auto", "standard_only")), "One tier serves all requests."),
    Field("speed", Ignored(("standard",)), "One speed serves all requests."),
    *(Field(name, Ignored(), _ROUTING) for name in ("fallbacks", "inference_geo")),
    Field("cache_control", Ignored(never_refused=True), "Prompts are cached without it."),
    Field("diagnostics", Ignored(), "Misses of the prefix cache are not explained."),
)
"""Ignored fields of Anthropic's routes."""

_OTHER_SAMPLER = "A method of sampling that this server does not have."
_OTHER_LIMIT = "Another server's name of the limit; give `max_tokens`, or `max_output_tokens` for a response."

REFUSED_FIELDS = (
    Field("truncate_prompt_tokens", Unsupported(), "A prompt is never cut."),
    Field("truncation", Unsupported(("disabled",)), "A prompt is never cut."),
    Field("allowed_token_ids", Unsupported(), "`logit_bias` and the constraints restrict the tokens."),
    Field("bad_words", Unsupported(([],)), "`logit_bias` and the constraints restrict the tokens."),
    Field("use_beam_search", Unsupported((False,)), "Outputs are sampled."),
    Field("spaces_between_special_tokens", Unsupported((True,)), "Text is what the tokenizer decodes."),
    Field("logits_processors", Unsupported(([],)), "No code of clients runs in the server."),
    Field("custom_logit_processor", Unsupported(), "No code of clients runs in the server."),
    Field("lora_path", Unsupported(), "`model` chooses an adapter by its name."),
    Field("ebnf", Unsupported(), "`grammar` takes Lark."),
    Field("stop_regex", Unsupported(([],)), "`stop` takes texts."),
    Field("json_schema", Unsupported(), "`response_format` takes a JSON schema."),
    *(Field(name, Unsupported(), _OTHER_LIMIT) for name in ("n_predict", "num_predict", "max_new_tokens")),
    *(
        Field(name, Unsupported(neutral), _OTHER_SAMPLER)
        for name, neutral in (
            ("mirostat", (0,)),
            ("mirostat_mode", (0,)),
            ("typical_p", (1, 1.0)),
            ("tfs_z", (1, 1.0)),
            ("top_a", (0, 0.0)),
            ("dynatemp_range", (0, 0.0)),
            ("xtc_probability", (0, 0.0)),
            ("dry_multiplier", (0, 0.0)),
        )
    ),
)
"""Refused fields of generating routes, except for neutral values, because they would change the output."""

SINGLE_ANSWER_FIELDS = (
    Field("n", Unsupported((1,)), "One answer is made; send the request once for each."),
    Field("best_of", Unsupported((1,)), "One answer is made; send the request once for each."),
    Field("return_token_ids", Unsupported((False,)), "Only completions and chats return token ids."),
    Field("return_tokens_as_token_ids", Unsupported((False,)), "Only completions and chats return token ids."),
    Field("prompt_logprobs", Unsupported(), "Only completions and chats score their prompts."),
    Field("stream_format", Unsupported(), "A stream has the events of this route."),
)
"""Options of completions and chats that `/v1/responses` and `/v1/messages` refuse, except for neutral values."""
SINGLE_ANSWER = {"n": 1, "return_token_ids": False, "return_tokens_as_token_ids": False, "prompt_logprobs": None}
"""Neutral values of these options on both routes."""

IGNORED_PATHS = (
    ("messages[].id", "Names a message for its sender."),
    ("messages[].timestamp", "Names a message for its sender."),
    ("messages[].created_at", "Names a message for its sender."),
    ("messages[].cache_control", "Prompts are cached without it."),
    ("messages[].content[].cache_control", "Prompts are cached without it."),
    ("messages[].provider_specific_fields", "What another provider added to its answer."),
    ("messages[].reasoning_details", "Signed or encrypted reasoning of another provider."),
    ("messages[].thinking_blocks", "Signed or encrypted reasoning of another provider."),
    ("messages[].annotations", "Links in an earlier answer."),
    ("messages[].tool_calls[].provider_specific_fields", "What another provider added to its answer."),
    ("tools[].cache_control", "Prompts are cached without it."),
    ("tools[].function.cache_control", "Prompts are cached without it."),
)
"""Ignored nested fields, with the reason."""

CONDITIONAL_NAMES = (
    *("reasoning_effort", "reasoning.effort", "enable_thinking", "thinking", "think", "reasoning.enabled"),
    *("stream_options", "max_tokens", "verbosity", "prediction"),
    *("include_reasoning", "separate_reasoning", "stream_reasoning"),
    *("thinking.budget_tokens", "output_config.effort"),
    *("truncation", "text.verbosity", "reasoning.summary", "reasoning.generate_summary", "tools[].format"),
    *(f"tools[].{kind}" for kind in ("web_search", "web_search_preview", "file_search", "code_interpreter", "mcp")),
    *(f"tools[].{kind}" for kind in ("image_generation", "computer_use_preview", "tool_search", "local_shell")),
    "client_metadata",
)
"""Nested fields that are ignored if the model's template or the rest of the request makes them irrelevant."""

OTHER = "other"


def _names(fields: Iterable[Field]) -> set[str]:
    return {field.name for field in fields if isinstance(field.type, Ignored)}


_LABELS = frozenset(
    {
        *_names((*IGNORED_FIELDS, *NO_EFFECT_FIELDS, *ANTHROPIC_FIELDS)),
        *(path for path, _ in IGNORED_PATHS),
        *CONDITIONAL_NAMES,
    }
)


def ignored_label(path: str) -> str:
    """Return the metric label of an ignored field.

    Clients cannot add labels.
    """
    return path if path in _LABELS else OTHER
