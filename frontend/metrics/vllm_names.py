"""Names of equivalent metrics in vLLM."""

from collections.abc import Iterator

from msgspec import structs

from tandem.frontend.metrics.families import Family, Labels, Sample

_SAME_NAME = (
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens",
    "inter_token_latency_seconds",
    "kv_cache_usage_perc",
    "lora_requests_info",
    "num_preemptions",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "prompt_tokens_cached",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success",
    "request_time_per_output_token_seconds",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_drafts",
    "time_to_first_token_seconds",
)
_EARLIER_NAMES = {
    "inter_token_latency_seconds": ("time_per_output_token_seconds",),
    "kv_cache_usage_perc": ("gpu_cache_usage_perc",),
}
"""Earlier names in vLLM, which older dashboards use."""

VLLM_NAMES = {
    **{f"tandem_{name}": (f"vllm:{name}",) for name in _SAME_NAME},
    **{
        f"tandem_{name}": (f"vllm:{name}", *(f"vllm:{other}" for other in others))
        for name, others in _EARLIER_NAMES.items()
    },
    # Prometheus reserves the suffix _total for counters, and this is a histogram.
    "tandem_iteration_tokens": ("vllm:iteration_tokens_total",),
}
"""vLLM's name of each metric, without the suffix of counters."""

_ENGINE: Labels = (("engine", "0"),)
"""vLLM's label for the engine number; there is one engine."""


def with_model(family: Family, model_name: str) -> Family:
    """Add the label `model_name` to a family that vLLM also has."""
    if family.name not in VLLM_NAMES or not model_name:
        return family
    return _labelled(family, (("model_name", model_name),))


def aliases(family: Family) -> Iterator[Family]:
    """Yield a family under each of its names in vLLM."""
    length = len(family.name)
    for name in VLLM_NAMES.get(family.name, ()):
        samples = tuple([structs.replace(sample, name=name + sample.name[length:]) for sample in family.samples])
        yield _labelled(structs.replace(family, name=name, samples=samples), _ENGINE)


def _labelled(family: Family, labels: Labels) -> Family:
    samples = tuple([Sample(sample.name, labels + sample.labels, sample.value) for sample in family.samples])
    return structs.replace(family, samples=samples)
