"""Compiles every released variant of the CUDA kernels and prints what each needs of the GPU.

Needs no GPU. The exit status is 1 when a kernel spills registers or exceeds what a TensorRT plugin may use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from trtllm_replayssm.cli.options import Count
from trtllm_replayssm.console import bytes_text, print_line, print_table
from trtllm_replayssm.errors import UserError

if TYPE_CHECKING:
    from trtllm_replayssm.plugins.report import KernelReport

#: Macros that say nothing about a kernel's cost, left out of the table.
HIDDEN_MACROS = {"DT_MIN", "DT_MAX", "RING_ROWS", "CURSOR_WORDS", "CONV_ROWS", "SILU"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", default="sm_90a", help="architecture to compile for, such as sm_90a, sm_100a or sm_103a"
    )
    parser.add_argument("--only", metavar="TEXT", help="only kernels whose name contains TEXT")
    parser.add_argument("--jobs", action=Count, default=2, help="kernels compiled at once")
    parser.add_argument("--json", action="store_true", help="print one JSON array, sizes in bytes")


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.plugins.compiler import check_architecture

    check_architecture(args.arch)
    reports = list(compiled(args))
    if args.json:
        print_line(json.dumps([as_dict(r) for r in reports], indent=2))
    else:
        print_table(
            f"CUDA kernels for {args.arch}",
            ["kernel", "variant", "threads", "registers", "spills", "shared", "in flight / SM", "occupancy"],
            [row(r) for r in reports],
        )
    faults = [r for r in reports if r.fault]
    if faults:
        first = faults[0]
        raise UserError(
            f"{len(faults)} of {len(reports)} kernels are not fit for release on {args.arch}; "
            f"{first.kernel.symbol} ({variant_text(first)}): {first.fault}"
        )
    return 0


def compiled(args: argparse.Namespace) -> Iterator[KernelReport]:
    from trtllm_replayssm.plugins.report import released_kernels, report

    kernels = [k for k in released_kernels() if args.only is None or args.only in k.symbol]
    if not kernels:
        raise UserError(f"no kernel's name contains {args.only!r}")
    with ThreadPoolExecutor(max_workers=args.jobs) as pool:
        yield from pool.map(lambda kernel: report(kernel, args.arch), kernels)


def row(r: KernelReport) -> list[str]:
    return [
        r.kernel.symbol,
        variant_text(r),
        str(r.kernel.block),
        str(r.binary.registers),
        bytes_text(r.binary.spill_bytes) if r.binary.spill_bytes else "none",
        bytes_text(r.binary.shared_bytes),
        bytes_text(r.in_flight) if r.kernel.in_flight else "",
        f"{r.occupancy:.0%}",
    ]


def variant_text(r: KernelReport) -> str:
    return " ".join(f"{name}={value}" for name, value in r.kernel.defines if name not in HIDDEN_MACROS)


def as_dict(r: KernelReport) -> dict[str, Any]:
    return {
        "kernel": r.kernel.symbol,
        "macros": dict(r.kernel.defines),
        "arch": r.arch,
        "threads": r.kernel.block,
        "registers": r.binary.registers,
        "spill_bytes": r.binary.spill_bytes,
        "stack_bytes": r.binary.stack_bytes,
        "shared_bytes": r.binary.shared_bytes,
        "in_flight_bytes": r.in_flight,
        "occupancy": r.occupancy,
        "fault": r.fault,
    }
