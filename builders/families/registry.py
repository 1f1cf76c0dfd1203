"""Finds the family of a checkpoint: by ``architectures``, then by ``model_type``, then by keys that only one family has."""

from __future__ import annotations

from typing import Any

from trtllm_replayssm.builders.families.bailing import Bailing
from trtllm_replayssm.builders.families.bamba import Bamba
from trtllm_replayssm.builders.families.base import Family
from trtllm_replayssm.builders.families.falcon_h1 import FalconH1
from trtllm_replayssm.builders.families.glm5_next import Glm5Next
from trtllm_replayssm.builders.families.granite import Granite
from trtllm_replayssm.builders.families.kimi_k3 import MARKERS as K3_MARKERS
from trtllm_replayssm.builders.families.kimi_k3 import KimiK3
from trtllm_replayssm.builders.families.kimi_linear import KimiLinear
from trtllm_replayssm.builders.families.lara import Lara
from trtllm_replayssm.builders.families.mamba2 import Mamba2Family
from trtllm_replayssm.builders.families.nemotron_h import NemotronH
from trtllm_replayssm.builders.families.olmo_hybrid import OlmoHybrid
from trtllm_replayssm.builders.families.qwen3_5 import Qwen35
from trtllm_replayssm.builders.families.qwen3_next import Qwen3Next
from trtllm_replayssm.builders.families.qwen4_exp import Qwen4
from trtllm_replayssm.builders.families.refused import MARKERS, REFUSED
from trtllm_replayssm.builders.families.state_spaces import StateSpaces
from trtllm_replayssm.builders.hf.config import TEXT_SECTIONS, HfConfig, text_section
from trtllm_replayssm.errors import UnsupportedModelError

FAMILIES: tuple[type[Family], ...] = (
    *(NemotronH, Mamba2Family, StateSpaces, Granite, FalconH1, Bamba),
    *(Qwen3Next, Qwen35, Qwen4, OlmoHybrid, Lara),
    *(KimiLinear, KimiK3, Bailing, Glm5Next),
)
#: Family by its ``architectures``.
BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
#: Family by ``model_type``, for a config without ``architectures``. bailing_hybrid names two models: see ``markers``.
BY_MODEL_TYPE: dict[str, type[Family]] = {
    "nemotron_h": NemotronH,
    "mamba2": Mamba2Family,
    "granitemoehybrid": Granite,
    "falcon_h1": FalconH1,
    "bamba": Bamba,
    "olmo_hybrid": OlmoHybrid,
    "lara_mini": Lara,
    "qwen3_next": Qwen3Next,
    "qwen3_5": Qwen35,
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe": Qwen35,
    "qwen3_5_moe_text": Qwen35,
    "qwen4_exp": Qwen4,
    "qwen4_exp_text": Qwen4,
    "kimi_linear": KimiLinear,
    "kimi_k3": KimiK3,
    "glm5_next": Glm5Next,
    "glm5_next_text": Glm5Next,
}
#: Keys of a wrapper around a text model that say nothing about the text model.
WRAPPER_KEYS = (
    *TEXT_SECTIONS,
    *("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id"),
    *("media_placeholder_token_id", "image_placeholder", "ignore_index"),
    *("language_model_only", "tie_word_embeddings", "eos_token_id", "quantization_config"),
)
HINT = (
    "supported: Nemotron-H, Qwen3-Next, Qwen3.5 to 3.8, Qwen3.8-Flash-Next, Kimi-Linear, Kimi-K3, Ling 3.0, GLM-5.3-Flash,"
    " Granite 4, Falcon-H1, Bamba, OLMo-Hybrid, Lara-4-Mini, Mamba2"
)


def find_family(values: dict[str, Any], tensor_shapes: dict[str, tuple[int, ...]]) -> Family:
    """The family of a checkpoint, with its config read.

    values: config.json. tensor_shapes: shape of every tensor by name; empty for a bare config.json.

    Raises UnsupportedModelError for architectures that are not built, CheckpointError for a config that does not add up.
    """
    family = recognise(values)
    return family(HfConfig(text_values(values)), tensor_shapes)


def recognise(values: dict[str, Any]) -> type[Family]:
    """The class that reads this config. Raises UnsupportedModelError with the reason where there is none."""
    section = text_section(values)
    levels = [values] if section is values else [values, section]
    names = [name for level in levels for name in architectures(level)]
    kinds = [kind for level in levels if isinstance(kind := level.get("model_type"), str)]
    for name in (*names, *kinds):
        if name in REFUSED:
            raise refusal(name, REFUSED[name])
    family = next((BY_ARCHITECTURE[name] for name in names if name in BY_ARCHITECTURE), None)
    if not names:
        family = next((found for level in levels if (found := by_model_type(level))), None)
        if not kinds and "ssm_cfg" in values:
            family = of_state_spaces(values["ssm_cfg"])
    if family is None:
        raise unknown((*names, *kinds))
    refuse_markers(family, levels)
    if family is KimiLinear and any(stated(level, path) for level in levels for path in K3_MARKERS):
        # The text model of K3 bears the name of Kimi-Linear's class.
        return KimiK3
    return family


def architectures(values: dict[str, Any]) -> list[str]:
    names = values.get("architectures")
    return [name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)]


def by_model_type(values: dict[str, Any]) -> type[Family] | None:
    """The family of a model_type; bailing_hybrid is Ling 3.0 only with the switches that Ling 2.5 and 2.6 do not have."""
    kind = values.get("model_type")
    if kind != "bailing_hybrid":
        return BY_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    if "kda_safe_gate" in values or "no_kda_lora" in values:
        return Bailing
    raise refusal("bailing_hybrid without KDA (Ling 2.5 or 2.6)", REFUSED["BailingMoeV2_5ForCausalLM"])


def of_state_spaces(ssm_cfg: Any) -> type[Family]:
    """The family of a config of the state-spaces package, by the layer that it names; without a name, that is Mamba-1."""
    layer = ssm_cfg.get("layer", "Mamba1") if isinstance(ssm_cfg, dict) else "Mamba1"
    if layer == "Mamba2":
        return StateSpaces
    reason = REFUSED["mamba"] if layer == "Mamba1" else "it is not known to this package"
    raise refusal(f"a state-spaces checkpoint of {layer} layers", reason)


def refuse_markers(family: type[Family], levels: list[dict[str, Any]]) -> None:
    """Raises UnsupportedModelError for a model that bears the family's name and is another one."""
    for name, path, reason in MARKERS:
        if name in family.architectures and any(stated(level, path) for level in levels):
            raise refusal(f"{name} with {path}", reason)


def stated(values: dict[str, Any], path: str) -> Any:
    """What stands there, None where nothing does. A dot leads into a nested object."""
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def refusal(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} is not supported: {reason}", HINT)


def unknown(names: tuple[str, ...]) -> UnsupportedModelError:
    if names:
        return refusal(names[0], "it is not known to this package")
    return UnsupportedModelError("config.json names neither architectures nor model_type", HINT)


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """The config of the text model. A wrapper's tie_word_embeddings wins over the nested one."""
    section = text_section(values)
    if section is values:
        return values
    wrapper = HfConfig(values)
    wrapper.ignore(*WRAPPER_KEYS)
    wrapper.finish()
    outer = values.get("tie_word_embeddings")
    return section if outer is None else {**section, "tie_word_embeddings": outer}
