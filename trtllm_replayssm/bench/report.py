"""A benchmark of requests as JSON in the shape of trtllm-bench, as CSV with a row a request, and as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import trtllm_replayssm
from trtllm_replayssm.bench.measures import Percentiles, Record, milliseconds
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.session import Session

#: Version of the JSON report's layout.
SCHEMA_VERSION = 1
CSV_COLUMNS = (
    "request_id",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "arrival_s",
    "ttft_ms",
    "tpot_ms",
    "latency_ms",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
)


def engine_info(engine: Engine) -> dict[str, Any]:
    config = engine.config
    return {
        "model": config.checkpoint.hf_architecture,
        "model_path": str(engine.folder),
        "engine_dir": str(engine.folder),
        "version": trtllm_replayssm.__version__,
        "backend": config.engine_flavour,
        "dtype": config.checkpoint.dtype,
        "kv_cache_dtype": config.checkpoint.dtype,
        "quantization": None,
        "max_input_length": config.max_seq_len - 1,
        "max_sequence_length": config.max_seq_len,
        "replayssm": config.replay.to_dict(),
    }


def weights_bytes(engine: Engine) -> int:
    """Bytes of one rank's weights; of a plan the size of its file, which holds little else."""
    if engine.config.engine_flavour == "tensorrt":
        return engine.config.rank_bytes[engine.rank]
    return sum(tensor.nbytes for tensor in engine.weights.values())


def memory_info(session: Session) -> dict[str, Any]:
    """Bytes of one rank: weights, the state of all slots by kind, and where the device counts it, the peak of the process."""
    import torch

    device = session.engine.device
    return {
        "weights_bytes": weights_bytes(session.engine),
        "slot_bytes": session.engine.config.slot_bytes(),
        "pool_bytes": session.state_bytes(),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def requests_report(
    session: Session,
    records: Sequence[Record],
    speculation: str | None,
    settings: dict[str, Any],
    machine: dict[str, Any],
) -> dict[str, Any]:
    """The report of a run. settings: the options that made it, to repeat it. speculation: the mode, None without."""
    config = session.engine.config
    first, last = min(r.arrival for r in records), max(r.times[-1] for r in records)
    seconds = last - first
    inputs, outputs = sum(r.input_tokens for r in records), sum(r.output_tokens for r in records)
    issue = max(r.arrival for r in records) - first
    latencies = milliseconds(r.latency for r in records)
    ttft, tpot = milliseconds(r.ttft for r in records), milliseconds(r.tpot for r in records if r.tpot is not None)
    speed = Percentiles.of((r.output_tokens - 1) / r.generation_time for r in records if r.generation_time > 0)
    assert latencies is not None
    assert ttft is not None
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "engine": engine_info(session.engine),
        "machine": machine,
        "world_info": {
            "tp_size": config.world_size,
            "pp_size": 1,
            "ep_size": 1,
            "world_size": config.world_size,
            "max_batch_size": config.max_batch_size,
            "max_num_tokens": config.max_num_tokens,
            "scheduling_policy": "in_flight",
            "kv_cache_percentage": None,
            "issue_rate": len(records) / issue if issue > 0 else None,
        },
        "request_info": {
            "num_requests": len(records),
            "avg_num_concurrent_requests": sum(r.latency for r in records) / seconds,
            "avg_input_length": inputs / len(records),
            "avg_output_length": outputs / len(records),
            "cached_input_tokens": sum(r.cached_tokens for r in records),
        },
        "performance": {
            "total_latency_ms": seconds * 1e3,
            "avg_request_latency_ms": latencies.average,
            "request_throughput_req_s": len(records) / seconds,
            "system_output_throughput_tok_s": outputs / seconds,
            "system_total_throughput_tok_s": (inputs + outputs) / seconds,
            "output_throughput_per_user_tok_s": sum(r.output_tokens / r.latency for r in records) / len(records),
            "output_throughput_per_gpu_tok_s": outputs / seconds / config.world_size,
            "request_latency_percentiles_ms": latencies.to_dict(),
        },
        "streaming_metrics": {
            "token_output_speed_tok_s": None if speed is None else speed.average,
            "avg_ttft_ms": ttft.average,
            "avg_tpot_ms": None if tpot is None else tpot.average,
            "ttft_percentiles": ttft.to_dict(),
            "tpot_percentiles": to_dict(tpot),
            "itl_percentiles": to_dict(milliseconds(gap for r in records for gap in r.itl)),
            "gen_tps_percentiles": to_dict(speed),
        },
        "memory": memory_info(session),
        "settings": settings,
    }
    if speculation is not None:
        report["decoding_stats"] = {"mode": speculation} | {
            f"{name}_percentiles": to_dict(Percentiles.of(getattr(r.speculation, name) for r in records))
            for name in ("num_draft_tokens", "num_accepted_draft_tokens", "draft_acceptance_rate", "acceptance_length")
        }
    return report


def to_dict(percentiles: Percentiles | None) -> dict[str, float] | None:
    return None if percentiles is None else percentiles.to_dict()


def requests_csv(records: Sequence[Record]) -> str:
    """One row a request; arrival in seconds after the first one's."""
    first = min(r.arrival for r in records)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for r in records:
        tpot = "" if r.tpot is None else f"{r.tpot * 1e3:.4f}"
        times = (f"{r.arrival - first:.6f}", f"{r.ttft * 1e3:.4f}", tpot, f"{r.latency * 1e3:.4f}")
        drafts = (r.speculation.num_draft_tokens, r.speculation.num_accepted_draft_tokens)
        writer.writerow((r.request_id, r.input_tokens, r.output_tokens, r.cached_tokens, *times, *drafts))
    return text.getvalue()


def table_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The figures of a report that fit on a screen."""
    performance, streaming, requests = report["performance"], report["streaming_metrics"], report["request_info"]
    yield "requests", f"{requests['num_requests']}, {requests['avg_num_concurrent_requests']:.1f} under way on average"
    yield "tokens a request", f"{requests['avg_input_length']:.1f} in, {requests['avg_output_length']:.1f} out"
    yield "request throughput", f"{performance['request_throughput_req_s']:.3f} /s"
    yield "output throughput", f"{performance['system_output_throughput_tok_s']:.1f} tokens/s"
    yield "output throughput a GPU", f"{performance['output_throughput_per_gpu_tok_s']:.1f} tokens/s"
    yield "output throughput a user", f"{performance['output_throughput_per_user_tok_s']:.2f} tokens/s"
    for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl")):
        if (found := streaming[f"{key}_percentiles"]) is not None:
            yield name, spread(found)
    yield "end-to-end latency", spread(performance["request_latency_percentiles_ms"])
    if (decoding := report.get("decoding_stats")) is not None:
        yield "draft_acceptance_rate", f"{decoding['draft_acceptance_rate_percentiles']['average']:.3f} on average"
        yield "acceptance_length", f"{decoding['acceptance_length_percentiles']['average']:.2f} on average"


def spread(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {found[name]:.2f}" for name in ("average", "p50", "p90", "p99", "maximum")) + " ms"
