"""Shows the layers of a model, its parameters, and the bytes of state that a request needs.

Reads a Hugging Face folder, a bare config.json, a checkpoint or an engine; tensors are not loaded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import FLOAT_DTYPES, Count, add_replay_arguments, path_argument, replay_config
from trtllm_replayssm.console import bytes_text, count_text, print_line, print_table

if TYPE_CHECKING:
    from trtllm_replayssm.inspection import Report, Subject

#: Columns of the table of layers, and the byte fields of inspection.LayerGroup that they show.
SIZES = {
    "weights": "weight_bytes",
    "state": "state_bytes",
    "read copy": "copy_bytes",
    "ring": "ring_bytes",
    "conv": "conv_bytes",
    "KV / token": "kv_bytes_per_token",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=path_argument, help="Hugging Face folder or config.json, checkpoint folder, or engine folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, sizes in bytes")
    stored = parser.add_argument_group("what if", "Without these, what is stored with the model counts.")
    stored.add_argument("--dtype", choices=FLOAT_DTYPES, help="dtype of activations and weights")
    stored.add_argument(
        "--tp_size", action=Count, help="ranks of the tensor-parallel group; bytes are those of one rank"
    )
    stored.add_argument("--max_seq_len", action=Count, help="tokens of a request, for the size of its KV cache")
    add_replay_arguments(parser, overriding=True)


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.inspection import inspect_model
    from trtllm_replayssm.subject import read_subject

    report = inspect_model(overridden(read_subject(args.path), args))
    if args.json:
        print_line(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(report)
    return 0


def overridden(subject: Subject, args: argparse.Namespace) -> Subject:
    """The subject with what the command line says instead. Raises UserError for what no model can have."""
    fields = {name: getattr(args, name) for name in ("dtype", "tp_size", "max_seq_len")}
    given = {name: value for name, value in fields.items() if value is not None}
    return replace(subject, replay=replay_config(args, subject.replay), **given)


def print_report(report: Report) -> None:
    subject, replay = report.subject, report.subject.replay
    rank = "" if subject.tp_size == 1 else f", one rank of {subject.tp_size}"
    print_line(
        f"{subject.source}: {subject.architecture}, {len(subject.decoder.layers)} residual branches, {subject.dtype}"
    )
    notes = [f"{count_text(report.active_parameters)} active per token"]
    if report.mtp_parameters:
        notes.append(f"{count_text(report.mtp_parameters)} for multi-token prediction")
    print_line(f"parameters: {count_text(report.parameters)}, {', '.join(notes)}")
    kept = "".join(f", {algorithm} with {bits:.2f} bits a weight" for algorithm, bits in report.bits_per_weight.items())
    print_line(f"weights{rank}: {bytes_text(report.weight_bytes)}{kept}")
    rounded = "" if replay.state_rounding == "nearest" else f" rounded {replay.state_rounding}ally"
    print_line(
        f"ReplaySSM: window {replay.window}, drafts {replay.max_draft_len}, state {replay.state_dtype}{rounded},"
        f" read as {replay.state_read_dtype}, ring {replay.ring_dtype}, fold {replay.fold}"
    )
    sizes = {name: field for name, field in SIZES.items() if name != "read copy" or report.total(field)}
    rows = [
        (
            f"{g.count} x {g.kind}",
            g.shape,
            count_text(g.parameters),
            *(bytes_text(getattr(g, field)) for field in sizes.values()),
        )
        for g in report.layers
    ]
    totals = (bytes_text(report.total(field)) for field in sizes.values())
    total = ("all layers", "", count_text(report.total("parameters")), *totals)
    columns = ("layers", "sizes", "parameters", *sizes)
    print_table(f"Layers; state, ring and conv of one request{rank}", columns, [*rows, total])
    print_line(
        f"one request of {subject.max_seq_len} tokens: {bytes_text(report.request_bytes)},"
        f" KV cache {bytes_text(report.kv_bytes)} of it"
    )
    if report.steps:
        steps = [(s.step, bytes_text(s.ordinary), bytes_text(s.replay), f"{s.ratio:.2f} x") for s in report.steps]
        title = f"Recurrent bytes moved per request and step{rank}: a model, not a measurement"
        print_table(title, ("step", "ordinary", "ReplaySSM", "less by"), steps)
