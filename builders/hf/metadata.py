"""What a Hugging Face folder says of its text: end tokens, vocabulary, trained length; and of dtypes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_replayssm.builders.checkpoint import MODEL_DTYPES
from trtllm_replayssm.builders.hf.config import text_section
from trtllm_replayssm.builders.hf.folder import HfFolder
from trtllm_replayssm.builders.safetensors_reader import FLOAT_DTYPES
from trtllm_replayssm.errors import CheckpointError
from trtllm_replayssm.replay import FLOAT_STATES

#: Keys of config.json for the dtype of recurrent states: Nemotron-H's, and Qwen's.
STATE_KEYS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def model_dtype(folder: HfFolder, asked: str) -> str:
    """``asked``, or for ``auto`` the dtype that config.json names, or else the one that most bytes of the weights have.

    Of a quantised checkpoint, the dtype named is that of its activations, and only weights in full precision count.
    Raises CheckpointError for a dtype that is not one of MODEL_DTYPES.
    """
    if asked != "auto":
        if asked not in MODEL_DTYPES:
            raise CheckpointError(f"dtype {asked!r} is not known", f"use auto, {', '.join(MODEL_DTYPES)}")
        return asked
    levels = (text_section(folder.config), folder.config)
    named = next((level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key)), None)
    if named is None:
        sizes: Counter[str] = Counter()
        for name, entry in folder.entries.items():
            if entry.dtype in FLOAT_DTYPES and name not in folder.quantised:
                sizes[str(FLOAT_DTYPES[entry.dtype])] += entry.nbytes
        named = sizes.most_common(1)[0][0] if sizes else None
    dtype = str(named).removeprefix("torch.")
    if dtype not in MODEL_DTYPES:
        raise CheckpointError(
            f"{folder.path} has dtype {named!r}, which is not known", f"choose one: --dtype {'|'.join(MODEL_DTYPES)}"
        )
    return dtype


def compare_state_dtype(folder: HfFolder, state_dtype: str, warn: Callable[[str], None]) -> None:
    """Tells ``warn`` where config.json names another dtype for recurrent states than they will have."""
    level = text_section(folder.config)
    for key in STATE_KEYS:
        named = str(level.get(key)).removeprefix("torch.")
        if named in FLOAT_STATES and named != state_dtype:
            warn(
                f"{folder.path / 'config.json'}: {key} is {named}, and the recurrent states will be {state_dtype};"
                f" --state_dtype {named} makes them what the model was published with"
            )


def eos_token_ids(folder: HfFolder, vocab_size: int, warn: Callable[[str], None]) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, or else config.json's, as transformers generates."""
    generation = optional_json(folder.path / "generation_config.json")
    levels = (
        ("generation_config.json", generation),
        ("config.json", folder.config),
        ("config.json", text_section(folder.config)),
    )
    where, value = next(
        ((where, level["eos_token_id"]) for where, level in levels if level.get("eos_token_id") is not None), ("", [])
    )
    ids = value if isinstance(value, list) else [value]
    if any(type(i) is not int for i in ids):
        raise CheckpointError(
            f"{folder.path / where}: eos_token_id is {value!r}; expected an integer or a list of them"
        )
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        warn(
            f"{folder.path / where}: eos_token_id {outside} is outside the vocabulary of {vocab_size} and ends no text"
        )
    return tuple(dict.fromkeys(i for i in ids if i not in outside))


def num_tokens(folder: HfFolder, vocab_size: int, warn: Callable[[str], None]) -> int | None:
    """One more than the tokenizer's largest id, where the embedding has rows beyond it; None otherwise."""
    path = folder.path / "tokenizer.json"
    data = optional_json(path)
    try:
        vocabulary = data.get("model", {}).get("vocab", {})
        # Unigram vocabularies are lists of (piece, score) in the order of ids.
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in data.get("added_tokens", [])]
        count = max(ids, default=-1) + 1
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{path} is damaged: its vocabulary cannot be read", "download it again") from None
    if count > vocab_size:
        warn(f"{path} has ids up to {count - 1}, but the embedding has {vocab_size} rows; such tokens cannot be read")
    return count if 0 < count < vocab_size else None


def max_position_embeddings(folder: HfFolder) -> int | None:
    """Trained length in tokens, or None where config.json does not tell."""
    level = text_section(folder.config)
    value = next((level[key] for key in ("max_position_embeddings", "model_max_length") if level.get(key)), None)
    if value is not None and (type(value) is not int or value < 1):
        raise CheckpointError(f"{folder.path / 'config.json'}: the trained length is {value!r}; expected an integer")
    return value


def optional_json(path: Path) -> dict[str, Any]:
    """The object in the file, empty when there is no file. Raises CheckpointError when it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}", "download it again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "download it again")
    return data
