"""Serves an engine with a real Triton server, and with OpenAI's interface before it, until it is told to stop."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from trtllm_replayssm.cli.options import Count, path_argument
from trtllm_replayssm.cli.serving import add_serving_arguments, serving_options
from trtllm_replayssm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serving_arguments(parser)
    network = parser.add_argument_group("network", "Port 0 is any free one.")
    network.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all of this machine's")
    network.add_argument("--http_port", type=int, default=8000, help="Triton's HTTP interface")
    network.add_argument("--grpc_port", type=int, default=8001, help="Triton's gRPC interface")
    network.add_argument("--metrics_port", type=int, default=8002, help="metrics for Prometheus")
    network.add_argument(
        "--openai_port", type=int, default=9000, help="OpenAI's interface, for engines with a tokenizer"
    )
    parser.add_argument(
        "--served_model_name", help="name of the model for OpenAI's clients; by default the engine folder's"
    )
    parser.add_argument("--tritonserver", type=path_argument, help="the server's program; by default it is looked for")
    parser.add_argument("--startup_timeout", type=float, default=600.0, help="seconds that loading the engine may take")
    parser.add_argument(
        "--exit_timeout",
        action=Count,
        least=0,
        default=5,
        help="seconds that running requests get when the server is told to stop",
    )
    parser.add_argument(
        "--triton_option",
        action="append",
        default=[],
        metavar="OPTION",
        help="handed on to tritonserver, as in --triton_option=--log-verbose=1; may be given several times",
    )


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.triton.serving import Deployment, serve

    options = serving_options(args)
    if not args.startup_timeout > 0:
        raise UserError("--startup_timeout must be more than 0")
    ports = {name: getattr(args, f"{name}_port") for name in ("http", "grpc", "metrics", "openai")}
    with tempfile.TemporaryDirectory(prefix="trtllm-replayssm-") as folder:
        deployment = Deployment(
            options=options,
            host=args.host,
            ports=ports,
            model=args.served_model_name or args.engine_dir.resolve().name,
            tritonserver=args.tritonserver,
            startup_timeout=args.startup_timeout,
            exit_timeout=args.exit_timeout,
            triton_options=tuple(args.triton_option),
            verbose=args.log_level in ("debug", "verbose"),
        )
        return serve(deployment, Path(folder))
