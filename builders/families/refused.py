"""Architectures that are recognised and not built, each with the reason."""

from __future__ import annotations

_MAMBA1 = "its recurrence is Mamba-1 (a decay per channel and a low-rank time step), not Mamba-2"
_LIGHTNING = "its linear attention (lightning, with a fixed decay per head) has no ReplaySSM layer"
_SHORT_CONV = "it has gated short convolutions and no recurrent state, so there is nothing to replay"
_OMNI = "the speech and vision wrapper is not supported; convert the language model from its own repository"
_RWKV = "its recurrence is RWKV, which has no ReplaySSM layer"
_XLSTM = "its recurrence is mLSTM and sLSTM, which have no ReplaySSM layer"

#: Reason by ``architectures[0]`` or ``model_type``.
REFUSED: dict[str, str] = {
    "NemotronHPuzzleForCausalLM": "its layers differ in size one by one (block_configs)",
    "nemotron_h_puzzle": "its layers differ in size one by one (block_configs)",
    "NemotronH_Omni_Reasoning_V3": _OMNI,
    "NemotronH_Nano_VL_V2": _OMNI,
    "nemotron_h_omni": _OMNI,
    "Zamba2ForCausalLM": "it needs shared attention blocks over hidden states and embeddings, with adapters",
    "zamba2": "it needs shared attention blocks over hidden states and embeddings, with adapters",
    "JambaForCausalLM": _MAMBA1,
    "jamba": _MAMBA1,
    "ZambaForCausalLM": _MAMBA1,
    "zamba": _MAMBA1,
    "FalconMambaForCausalLM": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "MambaForCausalLM": _MAMBA1,
    "mamba": _MAMBA1,
    "MiniMaxText01ForCausalLM": _LIGHTNING,
    "MiniMaxForCausalLM": _LIGHTNING,
    "minimax_text_01": _LIGHTNING,
    "minimax": _LIGHTNING,
    "BailingMoeV2_5ForCausalLM": _LIGHTNING,
    "BailingMoeLinearForCausalLM": _LIGHTNING,
    "BailingMoeLinearV2ForCausalLM": _LIGHTNING,
    "bailing_moe_linear": _LIGHTNING,
    "Lfm2ForCausalLM": _SHORT_CONV,
    "lfm2": _SHORT_CONV,
    "Lfm2MoeForCausalLM": _SHORT_CONV,
    "lfm2_moe": _SHORT_CONV,
    "Lfm3ForCausalLM": _SHORT_CONV,
    "lfm3": _SHORT_CONV,
    "inkling": _SHORT_CONV,
    "inkling_mm_model": _SHORT_CONV,
    "RecurrentGemmaForCausalLM": "its recurrence is the gated linear recurrent unit, which has no ReplaySSM layer",
    "recurrent_gemma": "its recurrence is the gated linear recurrent unit, which has no ReplaySSM layer",
    "RwkvForCausalLM": _RWKV,
    "RWKV7ForCausalLM": _RWKV,
    "rwkv": _RWKV,
    "rwkv7": _RWKV,
    "xLSTMForCausalLM": _XLSTM,
    "xlstm": _XLSTM,
    "ZayaForCausalLM": "its compressed convolutional attention has no ReplaySSM layer",
    "zaya": "its compressed convolutional attention has no ReplaySSM layer",
}

#: Keys that only this model has, where its name alone is not enough, with the reason. A dot leads into a nested object.
MARKERS: tuple[tuple[str, str, str], ...] = (
    ("NemotronHForCausalLM", "block_configs", "its layers differ in size one by one (block_configs)"),
)
