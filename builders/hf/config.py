"""A config.json whose every key must be read, ignored on purpose, or harmless.

Class defaults of transformers are never assumed: a key that a family needs and does not find is an error, and so is a key
that nobody read and whose value could change the computation.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from trtllm_replayssm.counts import LARGEST, integer_text
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError

Value = TypeVar("Value", bound=str | int | float | bool)

#: Counts of things that are named one by one: many times what released models have, and few enough to be listed.
MOST = {
    **dict.fromkeys(("num_hidden_layers", "first_k_dense_replace"), 2048),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "split_ngram_parts"), 8192),
}

#: Keys that describe training, generation, files or the tokenizer, and never the computation of logits. Descriptions of
#: quantised weights are read where the tensors are, see ``description``.
HARMLESS = frozenset(
    """_attn_implementation_autoset _commit_hash _name_or_path architectures attention_dropout attn_implementation
    auto_map bos_token_id chunk_size classifier_dropout compression_config diversity_penalty dtype embd_pdrop
    embedding_dropout eos_token_id finetuning_task hidden_dropout id2label initializer_range keys_to_ignore_at_inference
    label2id length_penalty max_length max_window_layers model_type num_beam_groups num_beams num_logits_to_keep
    num_return_sequences output_attentions output_dropout output_hidden_states output_router_logits pad_token_id
    problem_type quantization_config repetition_penalty rescale_prenorm_residual return_dict routed_dropout
    router_aux_loss_coef temperature top_k top_p torch_dtype transformers_version typical_p unk_token_id use_cache
    use_mamba_kernels use_return_dict""".split()
)

#: What to do about a file that is damaged.
AGAIN = "download it again"

#: Where wrappers of several modalities keep the config of their language model.
TEXT_SECTIONS = ("text_config", "llm_config", "language_config")


class HfConfig:
    """Strict access to one level of a config.json.

    Every accessor marks its key as read; ``finish`` raises for keys that nobody read. harmless: keys that may stay unread.
    """

    def __init__(self, values: dict[str, Any], where: str = "config.json", harmless: frozenset[str] = HARMLESS) -> None:
        self.values, self.where, self.harmless = values, where, harmless
        self.used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, or default where the key is absent or null."""
        self.used.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def typed(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """The value of that type. Raises CheckpointError when it is absent without a default, or of another type."""
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing, and no value can be assumed for it")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.fail(key, f"is {value!r}; expected {kind.__name__}")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return self.typed(key, int, default)

    def count(self, key: str, default: int | None = None, least: int = 0) -> int:
        """An integer of ``least`` or more, and no more than a model can have."""
        value, most = self.integer(key, default), MOST.get(key, LARGEST)
        if value < least:
            raise self.fail(key, f"is {integer_text(value)}; it must be {least} or more")
        if value > most:
            raise self.fail(key, f"is {integer_text(value)}; no model has more than {most}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        return self.count(key, default, least=1)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.typed(key, float, default)
        if not math.isfinite(value):
            raise self.fail(key, f"is {value}; expected a finite number")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0: an epsilon, a base of frequencies, a factor or bound of activations."""
        value = self.number(key, default)
        if value <= 0:
            raise self.fail(key, f"is {value:g}; expected a positive number")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self.typed(key, bool, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self.typed(key, str, default)

    def first(self, *keys: str) -> str:
        """The first of several spellings of a key that is present; marks all as read. Raises when none is."""
        self.used.update(keys)
        for key in keys:
            if key in self:
                return key
        raise self.fail(keys[0], "is missing, and no value can be assumed for it")

    def expect(self, key: str, *allowed: Any) -> None:
        """An absent key, or one of the values this package implements. Raises UnsupportedModelError otherwise."""
        value = self.get(key)
        # True == 1 in Python, but not in a config.
        if value is not None and not any(
            value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed
        ):
            choices = " or ".join(json.dumps(a) for a in allowed)
            raise UnsupportedModelError(
                f"{self.where}: {key} is {json.dumps(value)}, which is not implemented", f"supported: {choices}"
            )

    def ignore(self, *keys: str) -> None:
        """Keys that were considered and do not matter for this family."""
        self.used.update(keys)

    def section(self, key: str) -> HfConfig:
        """A nested object, with its own accounting. Raises when it is absent or not an object."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "is missing or not an object")
        return HfConfig(value, f"{self.where}: {key}", self.harmless)

    def finish(self) -> None:
        """Raises UnsupportedModelError when an unread key holds something other than null, false, 0 or an empty value."""
        unread = {k: v for k, v in self.values.items() if k not in self.used and k not in self.harmless and v}
        if unread:
            listed = ", ".join(f"{k} = {json.dumps(v)[:60]}" for k, v in sorted(unread.items()))
            raise UnsupportedModelError(
                f"{self.where} holds keys that this version does not know and that may change the model: {listed}",
                "an unknown switch that is on makes wrong output; ask for support of this checkpoint",
            )


def read_config(path: Path) -> dict[str, Any]:
    """config.json as a dict. Accepts the bare word Infinity and the ``{"__float__": "Infinity"}`` form of transformers 5.

    Raises CheckpointError when the file is missing or not a JSON object.
    """
    try:
        # utf-8-sig: editors on Windows begin a file with a mark.
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text, object_hook=float_objects, parse_int=integer_or_float)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist", "a model is a folder with a config.json") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", AGAIN) from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", AGAIN)
    return values


def text_section(values: dict[str, Any]) -> dict[str, Any]:
    """The level that describes the language model: a wrapper's text config, or the config itself."""
    for key in TEXT_SECTIONS:
        if isinstance(values.get(key), dict):
            return values[key]
    return values


def integer_or_float(text: str) -> int | float:
    """An integer of JSON; one beyond 64 bits is a float, as in most other languages, and so no count of anything."""
    return int(text) if len(text) < 20 else float(text)


def float_objects(data: dict[str, Any]) -> Any:
    return float(data["__float__"]) if set(data) == {"__float__"} else data
