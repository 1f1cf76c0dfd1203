"""Shows what this machine has, what it can run, and the command that brings what is missing."""

from __future__ import annotations

import argparse
import json

from trtllm_replayssm.console import print_line, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.doctor import diagnose

    diagnosis = diagnose()
    if args.json:
        print_line(json.dumps(diagnosis.to_dict(), indent=2))
        return 0
    findings = [(f.name, "yes" if f.present else "no", f.value) for f in diagnosis.findings]
    print_table("Found", ("", "usable", ""), findings)
    capabilities = [
        (c.name, "yes" if c.available else "no", "\n".join(c.missing), "\n".join(c.mend))
        for c in diagnosis.capabilities
    ]
    print_table("This machine can run", ("", "", "missing", "mended by"), capabilities)
    return 0
