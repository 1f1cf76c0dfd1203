"""The plans of an engine, and what each computes: the decoder, and its prediction head where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trtllm_replayssm.builders.layers.base import StateOptions
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.network.base import Network
from trtllm_replayssm.network.tensorrt.build import StepModel, StepSizes
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.runtime.engine_config import EngineConfig, engine_file

#: Plans by what they compute. The decoder's file has the name of every engine's rank file.
DECODER, HEAD = "decoder", "mtp"


def plan_models(config: EngineConfig) -> dict[str, StepModel]:
    """What each plan of one rank computes; the head's only in an engine that takes drafts."""
    models = {DECODER: decoder_model(config)}
    if head_pools(config):
        models[HEAD] = head_model(config)
    return models


def plan_file(rank: int, plan: str) -> str:
    return engine_file(rank) if plan == DECODER else f"rank{rank}.{plan}.engine"


def state_file(rank: int) -> str:
    """The few weights that a session needs besides the plans, to materialise prefixes (slot_state.recurrences)."""
    return f"rank{rank}.state.safetensors"


def state_weights(config: EngineConfig, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those weights, out of all of one rank."""
    mixers = [name for name, layer in config.decoder().named_parts() if isinstance(layer, Mamba2)]
    return {f"{name}.{part}": weights[f"{name}.{part}"] for name in mixers for part in ("A_log", "D")}


def state_options(config: EngineConfig) -> StateOptions:
    return StateOptions(config.replay, config.checkpoint.torch_dtype, config.max_seq_len)


def head_pools(config: EngineConfig) -> dict[str, Pool]:
    return config.decoder().mtp_pools(state_options(config))


def decoder_model(config: EngineConfig) -> StepModel:
    """Outputs ``logits`` and, for a prediction head, ``hidden_states [rows, tokens, hidden_size]``."""
    decoder, replay, with_head = config.decoder(), config.replay, bool(head_pools(config))

    def forward(net: Network, token_ids: Any, previous: Any) -> dict[str, Any]:
        hidden = decoder.hidden(net, token_ids, replay)
        logits = {"logits": decoder.logits(net, hidden, last_only=True)}
        return logits | ({"hidden_states": hidden} if with_head else {})

    return StepModel(forward, decoder.pools(state_options(config)), config.checkpoint.torch_dtype, replay.window)


def head_model(config: EngineConfig) -> StepModel:
    """Outputs ``hidden_states`` and ``logits`` of the prediction head; reads ``previous_hidden``."""
    decoder, replay = config.decoder(), config.replay

    def forward(net: Network, token_ids: Any, previous: Any) -> dict[str, Any]:
        hidden = decoder.predicted(net, token_ids, previous, replay)
        return {"logits": decoder.logits(net, hidden, last_only=True), "hidden_states": hidden}

    activation = config.checkpoint.torch_dtype
    return StepModel(forward, head_pools(config), activation, replay.window, decoder.hidden_size)


def step_sizes(config: EngineConfig, opt_num_tokens: int | None, gather_context_logits: bool) -> StepSizes:
    """The sizes that the engine's plans are built for."""
    longest = min(config.max_num_tokens, config.max_seq_len)
    return StepSizes(
        max_batch_size=config.max_batch_size,
        verify_tokens=config.replay.verify_tokens,
        prefill_tokens=longest,
        prefill_logits=longest if gather_context_logits else 1,
        usual_prefill=min(opt_num_tokens or config.prefill_chunk, longest),
        step_tokens=step_tokens(config, longest),
    )


def step_tokens(config: EngineConfig, tokens: int) -> int:
    """Columns of the input ``step_tokens`` for a step of so many tokens a row: beyond the window, T makes no difference."""
    return min(tokens, config.replay.window + 1)
