"""Tensors of the served model: those of the ``tensorrt_llm`` model of TensorRT-LLM's backend, and text beside token ids.

Shapes are without the leading batch dimension, which is 1: a request is one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of config.pbtxt. dtype: Triton's name without ``TYPE_``. dims: -1 is any size.

    alias: what the model that takes and gives text calls it, where that is another name. tokens_only: it has none such.
    """

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    alias: str = ""
    tokens_only: bool = False

    @property
    def text_name(self) -> str:
        return self.alias or self.name


#: All are optional for Triton; the model says what is missing.
INPUTS = (
    # The prompt: input_ids, or text_input.
    TensorSpec("input_ids", "INT32", (-1,), tokens_only=True),
    TensorSpec("input_lengths", "INT32", tokens_only=True),
    TensorSpec("text_input", "STRING"),
    TensorSpec("request_output_len", "INT32", alias="max_tokens"),
    TensorSpec("streaming", "BOOL", alias="stream"),
    TensorSpec("stop", "BOOL", tokens_only=True),
    # Which tokens.
    TensorSpec("temperature", "FP32"),
    TensorSpec("runtime_top_k", "INT32", alias="top_k"),
    TensorSpec("runtime_top_p", "FP32", alias="top_p"),
    TensorSpec("seed", "UINT64"),
    TensorSpec("repetition_penalty", "FP32"),
    TensorSpec("presence_penalty", "FP32"),
    TensorSpec("frequency_penalty", "FP32"),
    # When to stop.
    TensorSpec("min_tokens", "INT32"),
    TensorSpec("end_id", "INT32"),
    TensorSpec("pad_id", "INT32"),
    TensorSpec("stop_words_list", "INT32", (2, -1), tokens_only=True),
    TensorSpec("stop_words", "STRING", (-1,)),
    # What to tell.
    TensorSpec("exclude_input_in_output", "BOOL"),
    TensorSpec("return_log_probs", "BOOL"),
    TensorSpec("num_log_probs", "INT32"),
    TensorSpec("return_generation_logits", "BOOL"),
    TensorSpec("return_perf_metrics", "BOOL"),
    TensorSpec("add_special_tokens", "BOOL"),
    TensorSpec("skip_special_tokens", "BOOL"),
    # What the output is thought to begin with.
    TensorSpec("draft_input_ids", "INT32", (-1,), tokens_only=True),
    # Only with the value that changes nothing (asks.NEUTRAL).
    TensorSpec("beam_width", "INT32"),
    TensorSpec("num_return_sequences", "INT32"),
    TensorSpec("len_penalty", "FP32"),
    TensorSpec("bad_words_list", "INT32", (2, -1), tokens_only=True),
    TensorSpec("bad_words", "STRING", (-1,)),
    TensorSpec("return_context_logits", "BOOL"),
)

#: Those of the first group are in every response; the others on the last one, where they were asked for.
OUTPUTS = (
    TensorSpec("output_ids", "INT32", (-1, -1)),
    TensorSpec("sequence_length", "INT32", (-1,)),
    TensorSpec("text_output", "STRING", (-1,)),
    TensorSpec("finish_reason", "STRING", (-1,)),
    TensorSpec("cum_log_probs", "FP32", (-1,)),
    TensorSpec("output_log_probs", "FP32", (-1, -1)),
    # Of the likeliest tokens in each place, with num_log_probs.
    TensorSpec("top_token_ids", "INT32", (-1, -1, -1)),
    TensorSpec("top_log_probs", "FP32", (-1, -1, -1)),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1)),
    # With return_perf_metrics.
    TensorSpec("arrival_time_ns", "INT64"),
    TensorSpec("first_scheduled_time_ns", "INT64"),
    TensorSpec("first_token_time_ns", "INT64"),
    TensorSpec("last_token_time_ns", "INT64"),
    TensorSpec("acceptance_rate", "FP32"),
    TensorSpec("total_accepted_draft_tokens", "INT32"),
    TensorSpec("total_draft_tokens", "INT32"),
)
