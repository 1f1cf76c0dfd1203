"""Entry point: parses the command line, runs the command, turns exceptions into one line and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import trtllm_replayssm
from trtllm_replayssm.cli.parser import CommandParser, HelpFormatter
from trtllm_replayssm.cli.process import EXIT_SIGNAL, Terminated, prepare_streams, termination_raises
from trtllm_replayssm.console import LOG_LEVELS, LOGGER, print_error, start_logging
from trtllm_replayssm.errors import UserError

#: Subcommands, each a module of this package, and what ``--help`` says of it.
COMMANDS = {
    "convert": "make a TensorRT-LLM checkpoint from a Hugging Face folder",
    "build": "build an engine folder from a checkpoint",
    "refit": "put weights into a TensorRT engine that was built without them",
    "generate": "generate text with an engine",
    "bench": "measure throughput and latency of an engine",
    "serve": "serve an engine with Triton Inference Server and OpenAI's interface",
    "triton-repo": "write a model repository for Triton Inference Server",
    "inspect": "show layers, parameters, state and ring sizes of a model, a checkpoint or an engine",
    "tune": "find the window and dtypes of the recurrent state that suit a model on the GPU at hand",
    "kernels": "compile the CUDA kernels for a GPU and report their use of registers and memory",
    "doctor": "show what this machine can run, and how to get what is missing",
    "demo": "take a small trained model through everything and prove each step",
    "validate": "check this machine with tiny engines of every family",
}

#: A user error; argparse itself exits with 2.
EXIT_USER_ERROR = 1
#: A fault of the program.
EXIT_INTERNAL_ERROR = 3
#: Ended by SIGINT or by a closed pipe, as a shell reports it.
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trtllm-replayssm",
        description=trtllm_replayssm.__doc__,
        epilog="Exit status: 0 done; 1 files, values or the machine are at fault; 2 arguments that cannot be parsed; "
        "3 the program is at fault; 128 + N ended by signal N.",
    )
    parser.add_argument("--version", action="version", version=f"trtllm-replayssm {trtllm_replayssm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=CommandParser)
    for name, summary in COMMANDS.items():
        module = import_module(f"trtllm_replayssm.cli.{name.replace('-', '_')}")
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--log_level", choices=LOG_LEVELS, default="info", help="what is reported on stderr")
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status; raises SystemExit where argparse does."""
    prepare_streams()
    try:
        args = build_parser().parse_args(argv)
        start_logging(args.log_level)
        with termination_raises():
            status: int = args.run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
        print_error(error.message, error.hint)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    except Terminated as end:
        print_error(f"ended by {end}")
        return EXIT_SIGNAL + end.signum
    except BrokenPipeError:
        # The reader has gone; give Python's own flush at exit something to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print_error(f"{error.strerror or error}{where}")
        return EXIT_USER_ERROR
    except MemoryError:
        print_error("this machine has not enough memory for that")
        return EXIT_USER_ERROR
    except Exception as error:
        if LOGGER.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print_error(
            f"unexpected {type(error).__name__}: {' '.join(str(error).split())}",
            "this is a fault of the program; add --log_level debug to see where it happened, and report it",
        )
        return EXIT_INTERNAL_ERROR


if __name__ == "__main__":
    sys.exit(main())
