"""Fields on the wire keep their order: a peer of an earlier commit of the same protocol version still reads them."""

import inspect

import msgspec

from tandem.protocol import commands, events, params, stats
from tandem.protocol.version import PROTOCOL_VERSION

VERSION = 3
FIELDS = """
Abort 2: request_ids reason
EndSession 4: call session key
Hello 0: protocol_version engine_epoch name lost_identity
Inspect 6: call
Renew 7: adapter_changes
LoadAdapter 10: call name path load_inplace root
UnloadAdapter 11: call name
KeyClaim: name max_concurrent tokens_per_minute num_sequences prompt_tokens shares_cache
Pause 8: call mode refuse_new
Resume 9: call
ResetPrefixCache 20: call
InitWeightTransfer 21: call rank world_size address port unique_id buffer_bytes
StartWeightUpdate 22: call
UpdateWeights 23: call names dtypes shapes buffer_bytes is_refused
FinishWeightUpdate 24: call version
SetPolicy 5: call policy
Submit 1: request_id prompt_ids sampling constraint logprobs prompt_logprobs priority session cache_salt
    http_request_id group lost_engines is_traced key constraint_seconds
Answer 4: call ok message pause_changes
Closed 6: message
Failure: request_id code message retry_after
Finished: request_id reason stop_token_id
Heartbeat 3: engine_epoch phase percent detail pending stats adapters weights swap
    pause
PauseFacts: mode refuses_new is_complete
SwapWeights 12: call path running grace activate version root
CancelSwap 13: call
InspectSwap 14: call
SwapFacts: state path percent active_path version problem
WeightFacts: version state problem asleep is_sleep_due
Sleep 15: call level mode
WakeUp 16: call tags
AdapterFacts: name path version root weight_version
AdapterList: changes adapters
InspectedSequence: client request_id state row prompt_len generated launched pages shared_pages cached_tokens
    priority preemptions age session wait http_request_id key
InspectedSession: name busy pages idle key
Inspection 5: call policy stats pages_free pages_settling sequences sessions omitted pause_mode refuses_new
KeyUsage 8: name limit_requests remaining_requests limit_tokens remaining_tokens reset_tokens reset_requests
Launched 9: request_ids
Limits: max_rows kv_tokens page_size max_step_tokens max_waiting max_concurrent max_queued_tokens
ModelFacts: name vocab_size max_len end_ids tokenizer_fingerprint device dtype created template_fingerprint
    weight_format kv_dtype logprobs_mode max_loras max_lora_rank weight_transfer draft_model draft_weight_version
Ready 0: protocol_version engine_epoch model limits adapters
Refused 1: message
Speculation: method max_drafts is_adaptive
SequenceTimes: request_id admitted launched first_token ended num_steps preemptions
Started: request_id cached_tokens
StepOutput 2: step_id request_ids counts tokens finished failures logprobs started
TokenLogits: request_id start rows
TokenLogprobs: request_id start top lines ranks
DetailedOutput 7: step_id request_ids counts tokens finished failures logprobs started times
EngineStats: running waiting rows_total pages_used pages_total steps_in_flight steps_launched steps_committed
    oldest_wait prompt_tokens generation_tokens zombie_rows requests_accepted requests_finished requests_failed
    stage_seconds queue_time step_rows gpu_busy_seconds gpu_idle_seconds gpu_timed_steps requests_constrained
    compile_time mask_rows mask_seconds pages_cached prefix_queries prefix_hits pages_evicted preemptions sessions
    sessions_evicted paused page_size queued_prompt_tokens prompt_tokens_cached iteration_tokens prefill_time
    decode_time inference_time request_prompt_tokens request_generation_tokens request_max_tokens pause_changes
    grammar_workers grammar_workers_lost frontends start_seconds
Histogram: bounds counts total
SamplingParams: max_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed
    choice min_tokens ignore_eos stop_token_ids logit_bias_ids logit_bias_values
"""
"""Fields of each message and part of one, with its tag. New ones are only appended; other changes need another version.
"""


def wire_structs() -> dict[str, type[msgspec.Struct]]:
    return {
        name: found
        for module in (commands, events, params, stats)
        for name, found in inspect.getmembers(module, inspect.isclass)
        if issubclass(found, msgspec.Struct) and found.__struct_config__.array_like and found.__struct_fields__
    }


def test_fields_keep_their_order_within_a_version() -> None:
    assert PROTOCOL_VERSION == VERSION, "write the table anew"
    structs, seen = wire_structs(), set()
    for line in FIELDS.replace("\n    ", " ").strip().splitlines():
        head, _, names = line.partition(": ")
        name, _, tag = head.partition(" ")
        found, known = structs[name], names.split()
        assert str(found.__struct_config__.tag) == (tag or "None"), name
        assert list(found.__struct_fields__[: len(known)]) == known, name
        num_optional = len(found.__struct_defaults__)
        assert len(found.__struct_fields__) - num_optional <= len(known), f"a new field of {name} has no default"
        seen.add(name)
    assert structs.keys() == seen, "a message that the table lacks"
