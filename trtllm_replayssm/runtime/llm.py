"""``LLM``: text generation in a few lines of Python, with the calls of TensorRT-LLM's class of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.engine import Engine, PluginImpl
from trtllm_replayssm.runtime.generation import OnText, generate
from trtllm_replayssm.runtime.outputs import RequestId, RequestOutput
from trtllm_replayssm.runtime.prefix_cache import PrefixCache
from trtllm_replayssm.runtime.ranks import lost_ranks
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.options import SpeculationOptions
from trtllm_replayssm.runtime.tokenizer import TextStream, Tokenizer

#: Text, token ids, or ``{"prompt": text}``, ``{"prompt_token_ids": ids}``, ``{"input_ids": ids}``; a mapping may also have
#: ``"draft_token_ids"``, a guess of the output.
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """An engine with its session, scheduler and tokenizer.

        llm = LLM("engine_dir")
        for output in llm.generate(["Hello", "The sea"], SamplingParams(max_tokens=20)):
            print(output.outputs[0].text)

    An engine of several ranks runs under ``torchrun``; every rank makes the same calls and gets the same results.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        device: str | torch.device | None = None,
        plugin_impl: PluginImpl = "auto",
        speculation: SpeculationOptions | None = None,
        prefix_cache_bytes: int = 0,
        time_slice: int | None = None,
        cuda_graphs: bool | None = None,
        scaled_matmul: bool = False,
    ) -> None:
        """See Engine.load for the arguments and errors, SpeculationOptions for speculative decoding.

        prefix_cache_bytes: memory for what prompts begin with in common (PrefixCache); 0 for none. time_slice: see Scheduler.
        cuda_graphs: see Session.
        """
        self.engine = Engine.load(engine_dir, device=device, plugin_impl=plugin_impl, scaled_matmul=scaled_matmul)
        self.session = Session(self.engine, cuda_graphs=cuda_graphs)
        drafter, longest = (
            (speculation.drafter(self.session), speculation.max_draft_len) if speculation else (None, None)
        )
        prefix_cache = PrefixCache(self.session, prefix_cache_bytes) if prefix_cache_bytes else None
        self.scheduler = Scheduler(self.session, drafter, longest, time_slice, prefix_cache)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises UserError when the engine folder has none."""
        return Tokenizer(self.engine.folder)

    @property
    def has_tokenizer(self) -> bool:
        return (self.engine.folder / "tokenizer.json").is_file()

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_text: OnText = lambda request_id, text: None,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue one prompt, or several together; a list of ids is one prompt. Results come in the order of the prompts.

        sampling_params: one for all, or one for each prompt; greedy by default. on_text: called with a prompt's place and
        the text that became certain, while it is generated.
        Raises UserError, before anything runs, for prompts or parameters that cannot be used.
        """
        single = isinstance(inputs, str | Mapping) or (len(inputs) > 0 and isinstance(inputs[0], int))
        prompts: list[Any] = [inputs] if single else list(inputs)
        given = [prompt_of(i, prompt) for i, prompt in enumerate(prompts)]
        every_params = per_prompt(sampling_params, len(prompts))
        requests = [
            self.request(i, text, token_ids, params, drafts)
            for i, ((text, token_ids, drafts), params) in enumerate(zip(given, every_params))
        ]
        with lost_ranks(self.engine.config.world_size):
            generate(self.scheduler, requests, on_text)
        outputs = [
            RequestOutput(
                request.request_id, text, request.prompt, [request.output()], cached_tokens=request.cached_tokens
            )
            for request, (text, *_) in zip(requests, given)
        ]
        return outputs[0] if single else outputs

    def request(
        self,
        index: RequestId,
        text: str | None,
        token_ids: list[int] | None,
        params: SamplingParams,
        drafts: Sequence[int] = (),
        name: str | None = None,
    ) -> Request:
        """One prompt, ready to run; exactly one of text and token_ids is given.

        drafts: what is likely to be generated; its first steps verify that instead of making one token each. name: what
        messages call the prompt, by default ``prompt`` and its index.
        """
        if token_ids is None:
            token_ids = self.tokenizer.encode(text or "", params.add_special_tokens)
        stream = TextStream(self.tokenizer, params.skip_special_tokens) if self.has_tokenizer else None
        end_ids = params.end_ids(self.engine.config.checkpoint.eos_token_ids)
        return Request(index, token_ids, params, end_ids, stream, drafts, name)


def per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{count} prompts, but {len(params)} sampling_params", "give one for all, or one for each")
    return list(params)


def prompt_of(index: int, prompt: Any) -> tuple[str | None, list[int] | None, list[int]]:
    """Text or token ids of a prompt, and its drafts. Raises UserError when it is neither."""
    drafts: Any = []
    if isinstance(prompt, Mapping):
        drafts = prompt.get("draft_token_ids", [])
        if isinstance(drafts, str) or not isinstance(drafts, Sequence):
            raise UserError(f"prompt {index}: draft_token_ids is a {type(drafts).__name__}")
        given = [name for name in ("prompt", "prompt_token_ids", "input_ids") if name in prompt]
        if len(given) != 1:
            raise UserError(
                f"prompt {index} must have one of prompt, prompt_token_ids and input_ids, not {list(prompt)}"
            )
        prompt = prompt[given[0]]
        if isinstance(prompt, str) != (given == ["prompt"]):
            raise UserError(f"prompt {index}: {given[0]} is a {type(prompt).__name__}")
    if isinstance(prompt, str):
        return prompt, None, list(drafts)
    if isinstance(prompt, Sequence):
        return None, list(prompt), list(drafts)
    raise UserError(f"prompt {index} is a {type(prompt).__name__}; give text, token ids, or a dict with one of them")
