"""Finds the family of a checkpoint: by ``architectures``, then by ``model_type``, then by keys that only one family has."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.builders.families.bailing import Bailing
from trtllm_replayssm.builders.families.base import Family
from trtllm_replayssm.builders.families.kimi_linear import KimiLinear
from trtllm_replayssm.builders.families.mamba2 import Mamba2Family
from trtllm_replayssm.builders.families.nemotron_h import NemotronH
from trtllm_replayssm.builders.families.qwen3_5 import Qwen35
from trtllm_replayssm.builders.families.qwen3_next import Qwen3Next
from trtllm_replayssm.builders.families.refused import MARKERS, REFUSED
from trtllm_replayssm.builders.hf.config import TEXT_SECTIONS, HfConfig
from trtllm_replayssm.errors import UnsupportedModelError

FAMILIES: tuple[type[Family], ...] = (NemotronH, Mamba2Family, Qwen3Next, Qwen35, KimiLinear, Bailing)
#: Family by its ``architectures``.
BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
#: Family by ``model_type``, for a config without ``architectures``. bailing_hybrid names two models: see ``markers``.
BY_MODEL_TYPE: dict[str, type[Family]] = {
    "nemotron_h": NemotronH,
    "mamba2": Mamba2Family,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen35,
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe": Qwen35,
    "qwen3_5_moe_text": Qwen35,
    "kimi_linear": KimiLinear,
}
#: Keys of a wrapper around a text model that say nothing about the text model.
WRAPPER_KEYS = (
    *TEXT_SECTIONS,
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("language_model_only", "tie_word_embeddings", "eos_token_id", "quantization_config"),
)
HINT = "supported: Nemotron-H, Qwen3-Next, Qwen3.5 to 3.8, Kimi-Linear, Ling 3.0, Mamba2"


def find_family(values: dict[str, Any], tensor_shapes: dict[str, tuple[int, ...]]) -> Family:
    """The family of a checkpoint, with its config read.

    values: config.json. tensor_shapes: shape of every tensor by name; empty for a bare config.json.

    Raises UnsupportedModelError for architectures that are not built, CheckpointError for a config that does not add up.
    """
    family = recognise(values)
    text = text_values(values)
    return family(HfConfig(text), tensor_shapes)


def recognise(values: dict[str, Any]) -> type[Family]:
    """The class that reads this config. Raises UnsupportedModelError with the reason where there is none."""
    names = architectures(values)
    section = next((values[key] for key in TEXT_SECTIONS if isinstance(values.get(key), dict)), {})
    inner = architectures(section)
    for name in (*names, values.get("model_type"), *inner, section.get("model_type")):
        if name in REFUSED:
            raise refusal(name, REFUSED[name])
    for level in (values, section):
        for name in (*names, *inner, *model_type_architectures(level)):
            refuse_markers(name, level)
    for known in (*names, *inner):
        if known in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[known]
    for level in (values, section):
        family = None if names else by_model_type(level)
        if family is not None:
            return family
    what = names[0] if names else values.get("model_type")
    if what is None:
        raise state_spaces_or_unknown(values)
    raise refusal(what, "it is not known to this package")


def architectures(values: dict[str, Any]) -> list[str]:
    names = values.get("architectures") or []
    return [name for name in ([names] if isinstance(names, str) else names) if isinstance(name, str)]


def model_type_architectures(values: dict[str, Any]) -> tuple[str, ...]:
    family = by_model_type(values)
    return () if family is None else family.architectures


def by_model_type(values: dict[str, Any]) -> type[Family] | None:
    """The family of a model_type; bailing_hybrid is Ling 3.0 only with the switch that Ling 2.5 and 2.6 do not have."""
    kind = values.get("model_type")
    if kind == "bailing_hybrid":
        if "kda_safe_gate" in values or values.get("no_kda_lora"):
            return Bailing
        raise refusal("bailing_hybrid without KDA (Ling 2.5 or 2.6)", REFUSED["BailingMoeV2_5ForCausalLM"])
    return BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None


def refuse_markers(architecture: str, values: dict[str, Any]) -> None:
    for name, path, reason in MARKERS:
        level: Any = values
        for key in path.split("."):
            level = level.get(key) if isinstance(level, dict) else None
        if name == architecture and level:
            raise refusal(f"{name} with {path}", reason)


def refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} is not supported: {reason}", HINT)


def state_spaces_or_unknown(values: dict[str, Any]) -> UnsupportedModelError:
    if "ssm_cfg" in values:
        return UnsupportedModelError(
            "this is a checkpoint of the state-spaces package (ssm_cfg), whose config leaves sizes to that package's defaults",
            "convert it to the Mamba2ForCausalLM form of transformers first",
        )
    return UnsupportedModelError("config.json names neither architectures nor model_type", HINT)


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model. A wrapper's tie_word_embeddings wins over the nested one."""
    section = next((values[key] for key in TEXT_SECTIONS if isinstance(values.get(key), dict)), None)
    if section is None:
        return values
    wrapper = HfConfig(values)
    wrapper.ignore(*WRAPPER_KEYS)
    wrapper.finish()
    outer = values.get("tie_word_embeddings")
    return section if outer is None else {**section, "tie_word_embeddings": outer}
