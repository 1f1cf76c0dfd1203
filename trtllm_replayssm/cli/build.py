"""Builds an engine folder (config.json and one rank{N}.engine per rank) from a TensorRT-LLM checkpoint."""

from __future__ import annotations

import argparse
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from trtllm_replayssm.cli.options import Count, add_replay_arguments, path_argument
from trtllm_replayssm.cli.phases import phase_progress
from trtllm_replayssm.console import byte_progress, bytes_text, print_line, print_table

if TYPE_CHECKING:
    from trtllm_replayssm.runtime.engine_config import BuildOptions, EngineConfig
    from trtllm_replayssm.runtime.tensorrt.dry_run import DryRun

log = logging.getLogger(__name__)

#: Options of ``trtllm-build`` that decide nothing here: its command lines work, and are told so.
NEUTRAL = (
    *("max_input_len", "workers", "fast_build", "enable_debug_output", "logits_dtype", "gather_generation_logits"),
    *("kv_cache_type", "paged_kv_cache", "tokens_per_block", "remove_input_padding", "paged_state", "context_fmha"),
    *("use_paged_context_fmha", "gpt_attention_plugin", "gemm_plugin", "mamba_conv1d_plugin", "moe_plugin"),
    *("nccl_plugin", "reduce_fusion", "use_fused_mlp", "multiple_profiles"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint_dir", type=path_argument, required=True, help="folder written by convert")
    parser.add_argument(
        "--output_dir", type=path_argument, required=True, help="folder to write; an earlier engine in it is replaced"
    )
    parser.add_argument(
        "--engine_flavour",
        default="auto",
        help="what runs the engine: tensorrt, on the kind of GPU that built it, or embedded, this package with torch on any "
        "CPU or CUDA device; auto is tensorrt where TensorRT and a GPU are present",
    )
    parser.add_argument(
        "--max_batch_size", action=Count, default=8, help="requests that run together, one slot of state each"
    )
    parser.add_argument(
        "--max_seq_len",
        "--max_decoder_seq_len",
        action=Count,
        help="most tokens of a request, prompt and output; by default 4096, or less where the model was trained for less",
    )
    parser.add_argument("--max_num_tokens", action=Count, default=8192, help="most tokens of all requests in one step")
    add_replay_arguments(parser, overriding=True)
    parser.add_argument(
        "--tuned",
        type=path_argument,
        help="file written by tune; its choice counts where the options above are not given",
    )
    add_tensorrt_arguments(parser)
    parser.add_argument("--max_beam_width", type=int, default=1, help=argparse.SUPPRESS)
    for name in NEUTRAL:
        parser.add_argument(f"--{name}", nargs="?", const="", help=argparse.SUPPRESS)


def add_tensorrt_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TensorRT", "For --engine_flavour tensorrt; names and meanings of trtllm-build.")
    group.add_argument(
        "--dry_run", action="store_true", help="show the network as a table and build nothing; works on any machine"
    )
    group.add_argument(
        "--visualize_network",
        type=path_argument,
        metavar="DIR",
        help="folder for the networks as ONNX, without weights",
    )
    group.add_argument(
        "--opt_num_tokens",
        action=Count,
        help="tokens of a prefill step that kernels are chosen for; by default max_num_tokens / max_batch_size",
    )
    group.add_argument(
        "--gather_context_logits",
        "--gather_all_token_logits",
        action="store_true",
        help="a prefill can give the logits of all its tokens",
    )
    group.add_argument(
        "--aliased_state",
        action="store_true",
        help="tell TensorRT which inputs and outputs are one memory, instead of only binding them to one address",
    )
    group.add_argument(
        "--debug_plugins",
        action="store_true",
        help="run plugin layers through Python, which --log_level debug shows at work, instead of storing them in the plan",
    )
    group.add_argument(
        "--scaled_matmul",
        action="store_true",
        help="round inputs of FP8 and NVFP4 weights that were kept, by the checkpoint's own scales, so that such numbers are "
        "multiplied; less exact",
    )
    group.add_argument(
        "--input_timing_cache", type=path_argument, help="measurements of an earlier build, to be quicker"
    )
    group.add_argument("--output_timing_cache", type=path_argument, help="file for this build's measurements")
    group.add_argument(
        "--profiling_verbosity",
        choices=("layer_names_only", "detailed", "none"),
        default="layer_names_only",
        help="what the plan tells profilers of its layers",
    )
    group.add_argument(
        "--strip_plan", action="store_true", help="leave the weights out of the plan; refit puts them back"
    )
    group.add_argument(
        "--weight_streaming", action="store_true", help="weights that do not fit into the GPU stay on the host"
    )
    group.add_argument(
        "--weight_sparsity", action="store_true", help="use kernels for weights of which two in four are zero"
    )
    group.add_argument(
        "--monitor_memory", action="store_true", help="report what the builder uses, with --log_level debug"
    )


def run(args: argparse.Namespace) -> int:
    from trtllm_replayssm.errors import UserError
    from trtllm_replayssm.runtime.build import build_engine, decided

    if args.max_beam_width != 1:
        raise UserError(f"--max_beam_width is {args.max_beam_width}; there is no beam search", "leave it out")
    if given := [f"--{name}" for name in NEUTRAL if getattr(args, name) is not None]:
        log.warning("%s: of trtllm-build; decides nothing here", ", ".join(given))
    options = build_options(args)
    if args.tuned is not None:
        options = tuned(args, options)
    if args.visualize_network is not None:
        from trtllm_replayssm.runtime.tensorrt.dry_run import visualise

        for path in visualise(args.checkpoint_dir, options, args.visualize_network):
            log.info("network written to %s", path)
    if args.dry_run:
        from trtllm_replayssm.runtime.tensorrt.dry_run import dry_run

        print_dry_run(dry_run(args.checkpoint_dir, options))
        return 0
    options, what, folders = decided(options), f"building {args.output_dir}", (args.checkpoint_dir, args.output_dir)
    if options.engine_flavour == "tensorrt":
        with phase_progress(what) as phases:
            config = build_engine(*folders, options, phases=phases)
    else:
        with byte_progress(what) as written:
            config = build_engine(*folders, options, written)
    print_summary(args.output_dir, config)
    return 0


def build_options(args: argparse.Namespace) -> BuildOptions:
    from trtllm_replayssm.network.tensorrt.options import PlanOptions
    from trtllm_replayssm.runtime.engine_config import BuildOptions

    return BuildOptions(
        max_batch_size=args.max_batch_size,
        max_seq_len=args.max_seq_len,
        max_num_tokens=args.max_num_tokens,
        engine_flavour=args.engine_flavour,
        replay_window=args.replay_window,
        max_draft_len=args.max_draft_len,
        state_dtype=args.state_dtype,
        state_read_dtype=args.state_read_dtype,
        ring_dtype=args.ring_dtype,
        replay_fold=args.replay_fold,
        state_rounding=args.state_rounding,
        force_quantised_state=args.force_quantised_state,
        opt_num_tokens=args.opt_num_tokens,
        gather_context_logits=args.gather_context_logits,
        aliased_state=args.aliased_state,
        debug_plugins=args.debug_plugins,
        scaled_matmul=args.scaled_matmul,
        plan=PlanOptions(
            strip_plan=args.strip_plan,
            weight_streaming=args.weight_streaming,
            weight_sparsity=args.weight_sparsity,
            monitor_memory=args.monitor_memory,
            input_timing_cache=args.input_timing_cache,
            output_timing_cache=args.output_timing_cache,
            profiling_verbosity=args.profiling_verbosity,
        ),
    )


def tuned(args: argparse.Namespace, options: BuildOptions) -> BuildOptions:
    """The options with what --tuned chose. Raises UserError or CheckpointError when it does not fit the checkpoint."""
    import torch

    from trtllm_replayssm.builders.checkpoint import CheckpointConfig
    from trtllm_replayssm.tuning.tuned import differences, read_tuned, with_choice

    checkpoint = CheckpointConfig.read(args.checkpoint_dir)
    found = read_tuned(args.tuned, checkpoint)
    options = with_choice(options, found.choice)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    for sentence in differences(found, options, options.replay(checkpoint.replay), gpu):
        log.warning("%s: %s", args.tuned, sentence)
    return options


def print_dry_run(found: DryRun) -> None:
    """Tables of every network's parts, tensors and sizes."""
    for network in found.networks:
        capability = "{}.{}".format(*network.capability)
        print_line(f"{network.file}: for compute capability {capability}; checked by {network.checked_by}")
        parts = [
            (
                row.scope,
                ", ".join(f"{count} {kind.lower()}" for kind, count in sorted(row.layers.items()) if count),
                ", ".join(row.plugins),
                bytes_text(row.weight_bytes),
                row.output,
            )
            for row in network.rows
        ]
        print_table("Layers", ("part", "layers", "plugin layers", "constants", "output"), parts)
        print_table("Inputs and outputs", ("tensor", "", "shape"), network.tensors)
    profiles = [
        (name, *(f"{sizes[0]} to {sizes[2]}, usually {sizes[1]}" for sizes in profile.values()))
        for name, profile in zip(("prefill", "decode", "verify"), found.profiles)
    ]
    print_table("Profiles", ("step", *found.profiles[0]), profiles)


def print_summary(folder: Path, config: EngineConfig) -> None:
    """What was built; ``inspect`` tells more."""
    prompt = '--input_text "..."' if (folder / "tokenizer.json").is_file() else "--input_file ROWS_WITH_INPUT_IDS.jsonl"
    rows = [
        ("flavour", config.engine_flavour),
        ("weights", f"{bytes_text(max(config.rank_bytes))} a rank, {config.world_size} rank(s)"),
        ("state", f"{bytes_text(config.slot_bytes())} a request and rank, KV cache of {config.max_seq_len} included"),
        ("limits", f"{config.max_batch_size} requests, {config.max_seq_len} tokens each"),
        ("next", f"trtllm-replayssm generate --engine_dir {shlex.quote(str(folder))} {prompt}"),
    ]
    print_table(f"engine {folder}", ("", ""), rows)
