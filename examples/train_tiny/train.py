"""Trains one small byte-level hybrid on the Python standard library's source files, in a minute on a GPU.

    python examples/train_tiny/train.py mamba2 --output_dir OUTPUT        # also gated_delta, kda
    python examples/train_tiny/train.py kda --output_dir OUTPUT --device cpu --steps 20 --context_len 128

Writes OUTPUT/NAME, a Hugging Face folder with weights in bfloat16, a tokenizer and a model card, and OUTPUT/held_out.txt, the
text that no model was trained on. Both appear complete or not at all.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_corpus import Corpus, read_corpus
from tiny_models import MODELS
from tiny_training import Plan, bits_per_byte, train
from tokenizers import Tokenizer

from trtllm_replayssm.bench.machine import machine_info
from trtllm_replayssm.builders.staging import check_output, staged_folder
from trtllm_replayssm.console import print_error
from trtllm_replayssm.demo.models import open_time_step, write_tokenizer
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.devices import resolve_device
from trtllm_replayssm.runtime.files import output_file
from trtllm_replayssm.runtime.synthetic import filled

log = logging.getLogger("train_tiny")

CARD = "README.md"
#: What a folder of this script holds; only such a folder is replaced.
FILES = {CARD, "training.json", "config.json", "generation_config.json", "model.safetensors"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--device", help="cuda or cpu; by default the GPU where there is one")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument(
        "--seconds", type=float, default=75, help="the run ends after so long, however many steps it took"
    )
    parser.add_argument("--batch_bytes", type=int, default=32768, help="bytes of text in a step")
    parser.add_argument("--context_len", type=int, default=1024, help="bytes of a text")
    parser.add_argument("--long_context_len", type=int, help="bytes of a text at the end; by default 8 times as many")
    parser.add_argument("--long_share", type=float, default=0.2, help="share of the run that has long texts")
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    parser.add_argument("--eval_bytes", type=int, default=1 << 19, help="held-out bytes that the card's figure is of")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for option in ("steps", "seconds", "batch_bytes", "context_len", "long_context_len", "learning_rate"):
        value = getattr(options, option)
        if value is not None and value <= 0:
            parser.error(f"--{option} is {value}; it must be more than 0")
    if not 0 <= options.long_share < 1:
        parser.error(f"--long_share is {options.long_share}; it must be 0 to less than 1")
    if options.context_len < 2 or options.eval_bytes < options.context_len:
        parser.error("--context_len must be 2 or more, and --eval_bytes no less than it")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    contexts = [(0.0, options.context_len)]
    if options.long_share:
        contexts.append((1 - options.long_share, options.long_context_len or 8 * options.context_len))
    rest = {name: getattr(options, name) for name in ("steps", "seconds", "batch_bytes", "learning_rate", "seed")}
    return Plan(contexts=tuple(contexts), **rest)


def make_model(name: str, seed: int, device: torch.device) -> Any:
    """The model with new weights: decays as Mamba-2 was initialised, everything else as transformers draws it.

    Some classes of transformers start with states that forget within a token, and learn to remember late.
    """
    description = MODELS[name]
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = getattr(transformers, description.config_class)(**copy.deepcopy(description.arguments))
    model = getattr(transformers, description.model_class)._from_config(config, attn_implementation="sdpa")
    open_time_step(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("A_log", "dt_bias")):
                filled(parameter, parameter_name, 1.0, False, generator)
    return model.to(device)


def run(options: argparse.Namespace) -> None:
    plan, folder, device = plan_of(options), options.output_dir / options.name, resolve_device(options.device)
    check_output(folder, "--output_dir", lambda found: {path.name for path in found.iterdir()} <= FILES)
    # Matrix products of float32 in TF32: the recurrences, while everything else is in bfloat16.
    torch.set_float32_matmul_precision("high")
    with staged_folder(folder) as staging:
        write_tokenizer(staging)
        tokenizer = Tokenizer.from_file(str(staging / "tokenizer.json"))
        corpus = read_corpus(tokenizer)
        with output_file(options.output_dir / "held_out.txt") as file:
            file.write(corpus.held_out.encode())
        model = make_model(options.name, options.seed, device)
        text = torch.from_numpy(corpus.trained.astype("int32")).to(device)
        losses, start = [], time.monotonic()
        for number, progress, loss in train(model, text, plan):
            if not math.isfinite(loss):
                raise UserError(f"the loss is {loss} at step {number}", "lower --learning_rate")
            losses.append({"step": number, "bits_per_byte": loss})
            seconds = time.monotonic() - start
            log.info(
                "%s: step %d, %.0f %%, %.1f s: %.3f bits a byte", options.name, number, 100 * progress, seconds, loss
            )
        seconds = time.monotonic() - start
        # What is saved is what is judged.
        model.bfloat16().save_pretrained(staging)
        torch.set_float32_matmul_precision("highest")
        held_out = tokenizer.encode(corpus.held_out).ids[: options.eval_bytes]
        result = bits_per_byte(model.float(), held_out, min(options.context_len, len(held_out)), plan.batch_bytes)
        record = {
            "command": ["python", "examples/train_tiny/train.py", *without_path(sys.argv[1:], options.output_dir)],
            "machine": machine_info(device),
            "plan": asdict(plan),
            "parameters": sum(p.numel() for p in model.parameters()),
            "files": dict(zip(("trained", "held_out"), corpus.files)),
            "trained_bytes": len(corpus.trained),
            "last_step": losses[-1]["step"],
            "seconds": seconds,
            "losses": losses,
            "held_out_bits_per_byte": result,
        }
        (staging / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (staging / CARD).write_text(card(options, corpus, record), encoding="utf-8")
        # safetensors leaves its file to the owner alone.
        for path in staging.iterdir():
            path.chmod(0o644)
    log.info("%s: %.3f bits a byte of held-out text; written to %s", options.name, result, folder)


def without_path(arguments: list[str], output_dir: Path) -> list[str]:
    """The arguments as anyone can give them, whatever the folder was called."""
    return [argument.replace(str(output_dir), "OUTPUT") for argument in arguments]


def card(options: argparse.Namespace, corpus: Corpus, record: dict[str, Any]) -> str:
    machine, plan = record["machine"], record["plan"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    contexts = ", then ".join(f"{length} bytes from {start:.0%} of the run on" for start, length in plan["contexts"])
    return f"""\
# {options.name}

A byte-level language model of Python source: {MODELS[options.name].what}. {record["parameters"] / 1e6:.2f} million
parameters, weights in bfloat16. It is test data for trtllm-replayssm, and good for nothing else.

| | |
|---|---|
| held-out text | {record["held_out_bits_per_byte"]:.4f} bits a byte with {options.context_len} bytes of context, in float32 |
| text | standard library of Python {machine["python"]}, without test suites: {corpus.files[0]} files trained on, \
{corpus.files[1]} held out by the hash of their names, {record["trained_bytes"]} bytes to train on |
| training | {record["last_step"] + 1} steps of {plan["batch_bytes"]} bytes in {record["seconds"]:.0f} s; texts of {contexts} |
| date | {machine["date"]} |
| machine | {machine["name"]}, {versions} |
| command | `{" ".join(record["command"])}` |

The text is that of Python, under the PSF licence.
"""


def main() -> int:
    options = parse(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        run(options)
    except UserError as error:
        print_error(error.message, error.hint)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
