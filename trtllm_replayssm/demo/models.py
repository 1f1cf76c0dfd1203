"""Models of the demo in transformers: made with random weights and saved with a tokenizer, or loaded as they are."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trtllm_replayssm.console import LOGGER
from trtllm_replayssm.demo.catalogue import MODELS, SPECIAL_TOKENS, DemoModel
from trtllm_replayssm.errors import UserError, pip_extra

FLOOR_LIFTED = (
    "transformers floors the time steps of Nemotron-H at 0.001 in prefills, and in no other step; it is compared with without "
    "that floor, which released models do not have"
)
#: Norms of transformers that scale by ``1 + weight``.
ZERO_CENTRED = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen4ExpTextRMSNorm")


def make_checkpoint(family: str, folder: Path, seed: int = 0) -> Any:
    """Saves the model of ``MODELS[family]`` with new random weights, and a tokenizer; returns the transformers model.

    Raises UserError when transformers is missing.
    """
    return save_model(MODELS[family], folder, seed)


def save_model(description: DemoModel, folder: Path, seed: int = 0) -> Any:
    """The same for any description."""
    transformers = quiet_transformers()
    # Some classes change what they are given.
    config = getattr(transformers, description.config_class)(**copy.deepcopy(description.arguments))
    model = getattr(transformers, description.model_class)._from_config(config, attn_implementation="eager").eval()
    redraw(model, seed)
    open_time_step(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def load_checkpoint(folder: Path) -> Any:
    """The transformers model of a Hugging Face folder, in float32. Raises UserError when transformers is missing."""
    classes = quiet_transformers().AutoModelForCausalLM
    model = classes.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    open_time_step(model)
    return model


def quiet_transformers() -> Any:
    """The module, without its progress bars. Raises UserError when it is missing."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "the demo compares with transformers, which is not installed",
            pip_extra("demo"),
        ) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


@torch.no_grad()
def redraw(model: torch.nn.Module, seed: int) -> None:
    """Gives every parameter a value that matters: initial values leave norms at 1 and biases at 0, where a mistake hides."""
    generator = torch.Generator().manual_seed(seed)
    correction = [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    zero_centred = {id(m.weight) for m in model.modules() if type(m).__name__ in ZERO_CENTRED}
    for name, parameter in [*model.named_parameters(), *correction]:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(drawn(name, noise, id(parameter) in zero_centred))


def drawn(name: str, noise: Tensor, zero_centred: bool) -> Tensor:
    """Standard normal ``noise`` brought to the range that trained weights of this name have."""
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        return 0.5 + 0.5 * noise
    if leaf == "dt_bias":
        return 0.8 * noise - 4.0
    if leaf == "e_score_correction_bias":
        return 0.05 * noise
    if leaf == "D":
        return 1.0 + 0.3 * noise
    if "norm" in name:
        return 0.2 * noise + (0.0 if zero_centred else 1.0)
    if leaf == "bias":
        return 0.1 * noise
    if "conv" in name:
        return 0.4 * noise
    return noise if "embed" in name else noise / math.sqrt(noise.shape[-1])


def open_time_step(model: torch.nn.Module) -> None:
    """Undoes a floor of 0.001 under the time step, and says so: a comparison with transformers as it is would differ.

    transformers applies it in the scan of Nemotron-H, though neither its own one-token step nor the released models do.
    """
    mixers = [module for module in model.modules() if type(module).__name__ == "NemotronHMamba2Mixer"]
    for module in mixers:
        module.time_step_limit = (0.0, math.inf)  # type: ignore[assignment]
    if mixers:
        LOGGER.info(FLOOR_LIFTED)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json of a tokenizer whose tokens are the bytes of UTF-8."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": "<pad>"}), encoding="utf-8")
