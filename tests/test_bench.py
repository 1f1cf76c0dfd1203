"""The benchmark: definitions on hand-made courses, requests as they were ordered, reports, and input that is wrong."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import synthetic
from scheduling import MODEL, OPTIONS

from trtllm_replayssm.bench.driver import arrivals, run_requests
from trtllm_replayssm.bench.forced import ForcedScheduler
from trtllm_replayssm.bench.measures import Percentiles, Record
from trtllm_replayssm.bench.workload import Item, random_items
from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime import devices
from trtllm_replayssm.runtime.engine import Engine
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("bench") / "engine"
    return synthetic.load(synthetic.write_engine(folder, MODEL, OPTIONS, text=True))


# ---- definitions -----------------------------------------------------------------------------------------------------


def test_latencies_of_a_course_with_drafts() -> None:
    """Arrives at 10; one token at 11, three at 13, one at 14."""
    record = Record(0, 7, 10.0, [11.0, 13.0, 14.0], [1, 3, 1])
    assert (record.output_tokens, record.ttft, record.latency, record.generation_time) == (5, 1.0, 4.0, 3.0)
    assert record.tpot == 0.75
    assert record.itl == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1.0])
    assert sum(record.itl) == pytest.approx(record.generation_time)


def test_one_token_has_no_time_per_output_token() -> None:
    record = Record(0, 7, 10.0, [11.0], [1])
    assert record.tpot is None
    assert record.itl == []


def test_percentiles() -> None:
    found = Percentiles.of(range(1, 102))
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.minimum, found.maximum) == (51, 91, 100, 1, 101)
    assert (found.average, found.count) == (51, 101)
    assert found.std == pytest.approx(29.155, abs=1e-3)
    assert Percentiles.of([]) is None


# ---- requests --------------------------------------------------------------------------------------------------------


def test_random_requests_repeat_and_have_the_lengths_that_were_asked_for() -> None:
    items = random_items(400, 50, 20, 1000, input_stdev=10, output_stdev=5, seed=3)
    assert items == random_items(400, 50, 20, 1000, input_stdev=10, output_stdev=5, seed=3)
    assert items != random_items(400, 50, 20, 1000, input_stdev=10, output_stdev=5, seed=4)
    lengths = Percentiles.of(len(item.prompt) for item in items)
    assert lengths is not None
    assert lengths.average == pytest.approx(50, abs=2)
    assert lengths.std == pytest.approx(10, abs=2)
    assert all(0 <= token < 1000 for item in items for token in item.prompt)
    fixed = random_items(9, 3, 2, 1000)
    assert {(len(item.prompt), item.output_tokens) for item in fixed} == {(3, 2)}
    assert min(item.output_tokens for item in random_items(50, 1, 1, 9, output_stdev=5)) == 1


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4000, 50.0)
    assert times == arrivals(4000, 50.0)
    gaps = Percentiles.of(b - a for a, b in pairwise(times))
    assert gaps is not None
    assert gaps.average == pytest.approx(0.02, rel=0.05)
    assert gaps.std == pytest.approx(0.02, rel=0.1)
    assert times[0] == 0
    assert arrivals(3, None) == [0, 0, 0]


@pytest.mark.parametrize("load", [{}, {"concurrency": 2}, {"request_rate": 300.0}])
def test_every_request_gets_all_its_tokens_and_no_more(engine: Engine, load: dict[str, Any]) -> None:
    made = Scheduler(Session(engine), NgramDrafter())
    items = random_items(12, 12, 9, 250, input_stdev=4, output_stdev=4, seed=1)
    records = run_requests(made, items, **load)
    assert [r.output_tokens for r in records] == [item.output_tokens for item in items]
    assert [r.input_tokens for r in records] == [len(item.prompt) for item in items]
    for record in records:
        assert record.times == sorted(record.times)
        assert record.times[0] > record.arrival
    if load.get("concurrency"):
        events = sorted([(r.arrival, 1) for r in records] + [(r.times[-1], -1) for r in records])
        running = [sum(change for _, change in events[: i + 1]) for i in range(len(events))]
        assert max(running) == 2
    if load.get("request_rate"):
        assert [r.arrival - records[0].arrival for r in records] == pytest.approx(arrivals(12, 300.0), abs=1e-6)


def test_forced_acceptance_is_what_it_says(engine: Engine) -> None:
    made = ForcedScheduler(Session(engine), acceptance_length=3)
    records = run_requests(made, random_items(6, 9, 31, 250))
    for record in records:
        assert record.counts == [1, *[3] * 10]
        assert record.speculation.acceptance_length == 3
    assert made.statistics.num_accepted_draft_tokens == 6 * 20
    with pytest.raises(UserError, match="cannot keep 5 tokens"):
        ForcedScheduler(Session(engine), acceptance_length=5)


def test_a_request_that_does_not_fit_stops_the_run_before_it_begins(engine: Engine) -> None:
    made = Scheduler(Session(engine))
    with pytest.raises(UserError, match="prompt 1 has 70 tokens"):
        run_requests(made, [Item([2], 3), Item([2] * 70, 3)])
    assert not made.busy
    with pytest.raises(UserError, match="prompt 1 has 60 tokens; with 5 more it is longer than max_seq_len 64"):
        run_requests(made, [Item([2], 3), Item([2] * 60, 5)])
    assert not made.busy


# ---- command ---------------------------------------------------------------------------------------------------------


def bench(engine: Engine, *words: object) -> int:
    return main(["bench", "--engine_dir", str(engine.folder), *map(str, words)])


def test_reports(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, csv_file = tmp_path / "report.json", tmp_path / "report.csv"
    lengths = ("--num_requests", 7, "--input_len", 12, "--output_len", 10, "--output_stdev", 3)
    files = ("--report_json", json_file, "--report_csv", csv_file)
    assert bench(engine, *lengths, *files, "--speculative_decoding_mode", "ngram", "--prefix_cache_gib", 0.01) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("TTFT", "TPOT", "ITL", "end-to-end latency", "draft_acceptance_rate"))
    report = json.loads(json_file.read_text())
    rows = list(csv.DictReader(csv_file.open()))
    outputs = [int(row["output_tokens"]) for row in rows]
    assert len(rows) == report["request_info"]["num_requests"] == 7
    assert report["request_info"]["avg_output_length"] == pytest.approx(sum(outputs) / 7)
    seconds = report["performance"]["total_latency_ms"] / 1e3
    assert report["performance"]["system_output_throughput_tok_s"] == pytest.approx(sum(outputs) / seconds)
    latencies = [float(row["latency_ms"]) for row in rows]
    found = report["performance"]["request_latency_percentiles_ms"]
    assert found["maximum"] == pytest.approx(max(latencies), abs=1e-3)
    assert found["average"] == pytest.approx(sum(latencies) / 7, abs=1e-3)
    assert report["decoding_stats"]["mode"] == "ngram"
    assert report["decoding_stats"]["acceptance_length_percentiles"]["minimum"] >= 1
    assert report["settings"]["num_requests"] == 7
    assert report["machine"]["versions"]["torch"]
    assert report["memory"]["weights_bytes"] > 0
    for block in ("engine", "machine", "world_info", "request_info", "performance", "streaming_metrics"):
        assert report[block]


def test_a_data_set_of_text_and_ids(engine: Engine, tmp_path: Path) -> None:
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    data.write_text(
        '{"task_id": 0, "prompt": "Hello", "output_tokens": 4}\n\n{"input_ids": [5, 6], "output_tokens": 6}\n'
    )
    assert bench(engine, "--dataset", data, "--report_json", report, "--concurrency", 1) == 0
    info = json.loads(report.read_text())["request_info"]
    assert (info["num_requests"], info["avg_input_length"], info["avg_output_length"]) == (2, 3.5, 5)
    # One after the other: their times cannot add up to more than the run's.
    assert 0 < info["avg_num_concurrent_requests"] <= 1 + 1e-9


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--num_requests", "0"), "num_requests is 0"),
        (("--output_len", "0"), "output_len is 0"),
        (("--input_stdev", "-1"), "input_stdev is -1"),
        (("--input_stdev", "nan"), "input_stdev is nan"),
        (("--output_stdev", "inf"), "output_stdev is inf"),
        (("--prefix_cache_gib", "nan"), "prefix_cache_gib is nan"),
        (("--prefix_cache_gib", "inf"), "prefix_cache_gib is inf"),
        (("--prefix_cache_gib", "-1"), "prefix_cache_gib is -1"),
        (("--plot_dir", "plots"), "--plot_dir is for decode steps"),
        (("--decode_batch_sizes", "1", "--report_csv", "x.csv"), "--report_csv has a row a request"),
        (("--decode_batch_sizes", "1", "--batch_size", "0"), "--batch_size is 0"),
        (("--decode_batch_sizes", "4", "0"), "--decode_batch_sizes is 0"),
        (("--profile_context_lens", "0"), "--profile_context_lens is 0"),
        (("--decode_batch_sizes", "1", "--context_len", "0"), "--context_len is 0"),
        (("--decode_batch_sizes", "1", "--steps", "-1"), "--steps is -1"),
        (("--decode_batch_sizes", "1", "--draft_len", "-4"), "--draft_len is -4; it must be 0 or more"),
        (("--decode_batch_sizes", "1", "--accepted", "0"), "--accepted is 0; it must be 1 or more"),
        (("--decode_batch_sizes", "1", "--plot_dir", "/proc/nowhere"), "/proc/nowhere"),
        (("--input_len", "90"), "leaves no room for output"),
        (("--input_len", "2147483647"), "is 2147483647 tokens, which leaves no room for output"),
        (("--input_stdev", "1e9"), " tokens, which leaves no room for output"),
        (("--input_stdev", "1e308"), "input_stdev is 1e+308; it must be 0 to 2147483647"),
        (("--output_stdev", "1e308"), "output_stdev is 1e+308; it must be 0 to 2147483647"),
        (("--num_requests", "2147483647"), "num_requests is 2147483647; it must be 1000000 or less"),
        (("--dataset", "/nowhere/data.jsonl"), "--input_len is for random requests"),
        (("--decode_batch_sizes", "1", "9999"), "--decode_batch_sizes 9999 is more than the"),
        (("--profile_context_lens", "9", "--batch_size", "9999"), "--batch_size 9999 is more than the"),
        (("--request_rate", "nan"), "request_rate is nan"),
        (("--concurrency", "0"), "concurrency is 0"),
        (("--warmup", "-1"), "--warmup is -1"),
        (("--max_draft_len", "2"), "--max_draft_len is for speculative decoding"),
        (("--forced_acceptance_length", "9"), "cannot keep 9 tokens"),
        (("--report_json", "/nowhere/report.json"), "/nowhere is not a folder"),
    ],
)
def test_wrong_options_are_one_sentence(
    engine: Engine, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert bench(engine, "--input_len", 9, "--output_len", 3, *words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert says in " ".join(lines)
    assert sum(line.startswith("error: ") for line in lines) == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("[1]", "is a list"),
        ("{", "is not JSON"),
        ('{"prompt": 3}', "has neither token ids nor text"),
        ('{"input_ids": []}', "has neither token ids nor text"),
        ('{"input_ids": [1], "output_tokens": 0}', "output_tokens is 0"),
        ('{"input_ids": [99999]}', "holds token id 99999"),
        ('{"prompt": ""}', "data.jsonl line 1: the prompt has no tokens"),
        ('{"prompt": "\\ud800"}', "data.jsonl line 1: prompt is not Unicode"),
        ("", "holds no requests"),
    ],
)
def test_rows_that_cannot_be_run_are_named(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str, says: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(row + "\n")
    assert bench(engine, "--dataset", data, "--output_len", 3) == 1
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_data_set_that_is_not_there(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(engine, "--dataset", "/nowhere/data.jsonl") == 1
    assert capsys.readouterr().err == "error: /nowhere/data.jsonl cannot be read: No such file or directory\n"


# ---- synthetic engines -----------------------------------------------------------------------------------------------


def small_config(folder: Path) -> Path:
    """config.json of Codestral Mamba in a size for a CPU."""
    path, published = folder / "config.json", Path(__file__).parent / "data" / "configs" / "codestral_mamba_7b.json"
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "expand": 2}
    sizes |= {"state_size": 16, "n_groups": 1, "intermediate_size": 64}
    path.write_text(json.dumps(json.loads(published.read_text()) | sizes))
    return path


def test_a_config_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    words = ["bench", "--synthetic_config", str(small_config(tmp_path)), "--dtype", "float32", "--max_batch_size", "3"]
    lengths = "--num_requests 5 --input_len 9 --output_len 8 --max_seq_len 64 --max_draft_len 2"
    forced = ["--forced_acceptance_length", "2", "--report_json", str(report)]
    assert main([*words, *lengths.split(), *forced]) == 0, capsys.readouterr().err
    data = json.loads(report.read_text())
    assert "of random weights" in capsys.readouterr().err
    assert data["world_info"]["max_batch_size"] == 3
    assert data["engine"]["replayssm"]["max_draft_len"] == 2
    assert data["decoding_stats"]["num_draft_tokens_percentiles"]["minimum"] > 0


def test_a_synthetic_engine_that_is_too_large_is_told_its_own_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["bench", "--synthetic_config", str(small_config(tmp_path)), "--num_requests", "1"]
    monkeypatch.setattr(devices, "available_bytes", lambda device: 10)
    assert main(words) == 1
    assert capsys.readouterr().err.endswith("hint: use a larger machine, or more ranks: a larger --tp_size\n")
    # Weights fit, and the state of a few requests.
    monkeypatch.setattr(devices, "available_bytes", lambda device: 100_000)
    assert main(words) == 1
    assert re.search(
        "hint: give --max_batch_size [1-7] or less, or a smaller --max_seq_len\n$", capsys.readouterr().err
    )


def test_options_of_a_synthetic_engine_are_not_for_a_built_one(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(engine, "--replay_window", 4) == 1
    assert "shapes the engine of a --synthetic_config" in capsys.readouterr().err
    assert main(["bench", "--synthetic_config", str(tmp_path)]) == 1
    assert "is not a file" in capsys.readouterr().err
    unknown = tmp_path / "config.json"
    unknown.write_text('{"model_type": "llama"}')
    assert main(["bench", "--synthetic_config", str(unknown)]) == 1
    assert capsys.readouterr().err.startswith("error: ")
