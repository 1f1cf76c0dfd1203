"""What a client gets: a request's updates, gathered until they are sent, as output tensors."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from trtllm_replayssm.runtime.outputs import CompletionOutput, Update
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.triton.asks import Ask

#: Output tensors by name, with the batch dimension.
Tensors = dict[str, np.ndarray]


class Times:
    """When things happened to a request, in ns since the epoch; 0 for what has not happened."""

    def __init__(self) -> None:
        self.arrival = time.time_ns()
        self.scheduled = self.first_token = self.last_token = 0

    def step(self, began: int, tokens: int) -> None:
        """A step that began at ``began`` has brought so many tokens."""
        self.scheduled = self.scheduled or began
        if tokens:
            self.last_token = time.time_ns()
            self.first_token = self.first_token or self.last_token


class Reply:
    """Everything between a request and its responses.

    A streaming request gets its new tokens with each response, another one gets all of them at the end. client_id: what the
    client calls the request; may be empty.
    """

    def __init__(self, ask: Ask, request: Request, times: Times, client_id: str = "") -> None:
        self.ask, self.request, self.times, self.client_id = ask, request, times, client_id
        self.sent, self.cumulative = 0, 0.0

    def tensors(self, updates: Iterable[Update]) -> Tensors | None:
        """The response that these updates make; None when it is not time for one. They hold no error."""
        updates = list(updates)
        output = updates[-1].output
        if not self.ask.streaming:
            if output is None:
                return None
            tokens, text = output.token_ids, output.text
        else:
            tokens = [token for update in updates for token in update.token_ids]
            text = "".join(update.text for update in updates)
            if not tokens and not text and output is None:
                return None
        start, self.sent = self.sent, self.sent + len(tokens)
        first = start == 0 and not self.ask.exclude_input
        shown = [*self.request.prompt, *tokens] if first and not self.ask.streaming else tokens
        made: Tensors = {
            "output_ids": np.asarray(shown, np.int32).reshape(1, 1, -1),
            "sequence_length": np.asarray([[len(shown)]], np.int32),
            "text_output": strings(text),
            "finish_reason": strings(output.finish_reason if output else ""),
        }
        if self.request.params.logprobs is not None:
            made |= self.log_probs(start, self.sent)
        if output is not None:
            made |= self.last(output)
        return made

    def log_probs(self, start: int, end: int) -> Tensors:
        """Of the tokens ``start`` to ``end``: their own, and the likeliest ones' in their places."""
        count = self.request.params.logprobs or 0
        places = self.request.logprobs[start:end]
        own = [found[token].logprob for token, found in zip(self.request.tokens[start:end], places)]
        self.cumulative += sum(own)
        made: Tensors = {
            "cum_log_probs": np.asarray([[self.cumulative]], np.float32),
            "output_log_probs": np.asarray(own, np.float32).reshape(1, 1, -1),
        }
        if count:
            best = [sorted(found.items(), key=lambda item: item[1].rank)[:count] for found in places]
            ids = [[token for token, _ in row] for row in best]
            values = [[found.logprob for _, found in row] for row in best]
            made["top_token_ids"] = np.asarray(ids, np.int32).reshape(1, 1, len(places), -1)
            made["top_log_probs"] = np.asarray(values, np.float32).reshape(1, 1, len(places), -1)
        return made

    def last(self, output: CompletionOutput) -> Tensors:
        """What only the last response says."""
        made: Tensors = {}
        if output.generation_logits is not None:
            made["generation_logits"] = output.generation_logits.float().numpy()[None, None]
        if self.ask.return_perf_metrics:
            counts, times = self.request.statistics, self.times
            made |= {
                "arrival_time_ns": np.asarray([[times.arrival]], np.int64),
                "first_scheduled_time_ns": np.asarray([[times.scheduled]], np.int64),
                "first_token_time_ns": np.asarray([[times.first_token]], np.int64),
                "last_token_time_ns": np.asarray([[times.last_token]], np.int64),
                "acceptance_rate": np.asarray([[counts.draft_acceptance_rate]], np.float32),
                "total_accepted_draft_tokens": np.asarray([[counts.num_accepted_draft_tokens]], np.int32),
                "total_draft_tokens": np.asarray([[counts.num_draft_tokens]], np.int32),
            }
        return made


def strings(value: str) -> np.ndarray:
    return np.asarray([[value.encode()]], np.object_)
