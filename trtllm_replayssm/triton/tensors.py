"""Tensors of the served model: those of the ``tensorrt_llm`` model of TensorRT-LLM's backend, and text beside token ids.

Shapes are without the leading batch dimension, which is 1: a request is one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of config.pbtxt. dtype: Triton's name without ``TYPE_``. dims: -1 is any size. text_name: what it is called in
    the model that takes and gives text; empty where that model has none such."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    text_name: str = ""


#: All are optional for Triton; the model says what is missing.
INPUTS = (
    # The prompt: input_ids, or text_input.
    TensorSpec("input_ids", "INT32", (-1,)),
    TensorSpec("input_lengths", "INT32"),
    TensorSpec("text_input", "STRING", text_name="text_input"),
    TensorSpec("request_output_len", "INT32", text_name="max_tokens"),
    TensorSpec("streaming", "BOOL", text_name="stream"),
    TensorSpec("stop", "BOOL"),
    # Which tokens.
    TensorSpec("temperature", "FP32", text_name="temperature"),
    TensorSpec("runtime_top_k", "INT32", text_name="top_k"),
    TensorSpec("runtime_top_p", "FP32", text_name="top_p"),
    TensorSpec("seed", "UINT64", text_name="seed"),
    # When to stop.
    TensorSpec("end_id", "INT32", text_name="end_id"),
    TensorSpec("pad_id", "INT32", text_name="pad_id"),
    TensorSpec("stop_words_list", "INT32", (2, -1)),
    TensorSpec("stop_words", "STRING", (-1,), text_name="stop_words"),
    # What to tell.
    TensorSpec("exclude_input_in_output", "BOOL", text_name="exclude_input_in_output"),
    TensorSpec("return_log_probs", "BOOL", text_name="return_log_probs"),
    TensorSpec("num_log_probs", "INT32", text_name="num_log_probs"),
    TensorSpec("return_generation_logits", "BOOL", text_name="return_generation_logits"),
    TensorSpec("return_perf_metrics", "BOOL", text_name="return_perf_metrics"),
    TensorSpec("add_special_tokens", "BOOL", text_name="add_special_tokens"),
    TensorSpec("skip_special_tokens", "BOOL", text_name="skip_special_tokens"),
    # Only with the value that changes nothing (asks.NEUTRAL).
    TensorSpec("beam_width", "INT32", text_name="beam_width"),
    TensorSpec("num_return_sequences", "INT32", text_name="num_return_sequences"),
    TensorSpec("repetition_penalty", "FP32", text_name="repetition_penalty"),
    TensorSpec("presence_penalty", "FP32", text_name="presence_penalty"),
    TensorSpec("frequency_penalty", "FP32", text_name="frequency_penalty"),
    TensorSpec("len_penalty", "FP32", text_name="len_penalty"),
    TensorSpec("min_tokens", "INT32", text_name="min_tokens"),
    TensorSpec("bad_words_list", "INT32", (2, -1)),
    TensorSpec("bad_words", "STRING", (-1,), text_name="bad_words"),
    TensorSpec("return_context_logits", "BOOL", text_name="return_context_logits"),
    TensorSpec("draft_input_ids", "INT32", (-1,)),
)

#: Those of the first group are in every response; the others on the last one, where they were asked for.
OUTPUTS = (
    TensorSpec("output_ids", "INT32", (-1, -1), text_name="output_ids"),
    TensorSpec("sequence_length", "INT32", (-1,), text_name="sequence_length"),
    TensorSpec("text_output", "STRING", (-1,), text_name="text_output"),
    TensorSpec("finish_reason", "STRING", (-1,), text_name="finish_reason"),
    TensorSpec("cum_log_probs", "FP32", (-1,), text_name="cum_log_probs"),
    TensorSpec("output_log_probs", "FP32", (-1, -1), text_name="output_log_probs"),
    # Of the likeliest tokens in each place, with num_log_probs.
    TensorSpec("top_token_ids", "INT32", (-1, -1, -1), text_name="top_token_ids"),
    TensorSpec("top_log_probs", "FP32", (-1, -1, -1), text_name="top_log_probs"),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1), text_name="generation_logits"),
    # With return_perf_metrics.
    TensorSpec("arrival_time_ns", "INT64", text_name="arrival_time_ns"),
    TensorSpec("first_scheduled_time_ns", "INT64", text_name="first_scheduled_time_ns"),
    TensorSpec("first_token_time_ns", "INT64", text_name="first_token_time_ns"),
    TensorSpec("last_token_time_ns", "INT64", text_name="last_token_time_ns"),
    TensorSpec("acceptance_rate", "FP32", text_name="acceptance_rate"),
    TensorSpec("total_accepted_draft_tokens", "INT32", text_name="total_accepted_draft_tokens"),
    TensorSpec("total_draft_tokens", "INT32", text_name="total_draft_tokens"),
)
