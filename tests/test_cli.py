"""The command line: help, exit codes, and one line for whatever a user or the machine does wrong."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trtllm_replayssm
from trtllm_replayssm import console
from trtllm_replayssm.cli import doctor
from trtllm_replayssm.cli import main as cli_main
from trtllm_replayssm.cli.main import COMMANDS, main
from trtllm_replayssm.cli.options import add_replay_arguments, replay_config
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.replay import ReplayConfig

COMMAND = [sys.executable, "-m", "trtllm_replayssm"]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    program = (
        "import sys, trtllm_replayssm.cli.main as m\n"
        "m.build_parser().format_help()\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'rich') if name in sys.modules])"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
    # 0.1 s on an idle machine.
    assert time.perf_counter() - start < 3


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"trtllm-replayssm {trtllm_replayssm.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "--log_level" in text
    assert "(default: None)" not in text and "(default: [])" not in text


@pytest.mark.parametrize("arguments", [[], ["transmogrify"], ["convert"], ["inspect", "x", "--log_level", "loud"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("trtllm-replayssm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--replay_windw", "8"], "unrecognized arguments: --replay_windw; did you mean --replay_window?"),
        (["build", "--checkpoint-dir=x"], "unrecognized arguments: --checkpoint-dir; did you mean --checkpoint_dir?"),
        (["inspect", "x", "--zzz", "--yyy"], "unrecognized arguments: --zzz --yyy"),
        (["inspect", "x", "y"], "unrecognized arguments: y"),
        (["generate", "--engine_dir", "e", "--input_text", "--help_me please", "y"], "unrecognized arguments: y"),
    ],
)
def test_unknown_arguments_are_named_by_the_command(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    usage, *_, last = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: trtllm-replayssm {arguments[0]} [-h]")
    assert last == f"trtllm-replayssm {arguments[0]}: error: {message}"


def test_what_follows_two_dashes_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--", "--nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: --nowhere does not exist\n")


def test_process_reports_a_user_error_in_two_lines(tmp_path: Path) -> None:
    done = run("convert", "--model_dir", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error == f"error: {tmp_path / 'nowhere'} does not exist"
    assert hint.startswith("hint: --model_dir must be")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_ended_in_the_middle_leaves_nothing_half_written(end: signal.Signals, tmp_path: Path) -> None:
    """The command stops itself once its output folder has begun, as a job scheduler would stop it."""
    script = f"""
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's child is to be ended, too
from trtllm_replayssm.builders.staging import staged_folder
from trtllm_replayssm.cli import doctor, main
from pathlib import Path

def run(args):
    with staged_folder(Path({str(tmp_path / "out")!r})) as staging:
        (staging / "rank0.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), {int(end)})

doctor.run = run
sys.exit(main.main(["doctor"]))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 128 + end
    assert ended.stderr == f"error: ended by {end.name}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_change_no_status(streams: str, tmp_path: Path) -> None:
    command = f"{sys.executable} -m trtllm_replayssm inspect {tmp_path / 'none'} {streams}"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path).returncode == 1


def speaking(text: str, streams: str = "", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """What becomes of a command that prints ``text`` and warns with it. streams: redirections of a shell."""
    program = (
        "import logging, sys\n"
        "from trtllm_replayssm import console\n"
        "from trtllm_replayssm.cli import doctor, main\n"
        "def run(args):\n"
        f"    logging.getLogger('trtllm_replayssm').warning({text!a})\n"
        f"    console.print_line({text!a})\n"
        f"    console.print_table({text!a}, ('', ''), [({text!a}, '1')])\n"
        "    return 0\n"
        "doctor.run = run\n"
        "sys.exit(main.main(['doctor']))"
    )
    command = f"{sys.executable} -c {shlex.quote(program)} {streams}"
    return subprocess.run(["bash", "-c", command], capture_output=True, env=os.environ | variables, timeout=60)


def test_a_result_for_a_closed_stdout_is_an_error() -> None:
    done = speaking("found", ">&-")
    assert done.returncode == 1
    assert b"error: standard output is closed, and the result is lost\nhint: " in done.stderr


def test_a_closed_stderr_costs_no_result() -> None:
    done = speaking("found", "2>&-")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, b"found")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_every_text_can_be_printed(encoding: str) -> None:
    text = "caf\u00e9 \U0001f40d \udcff"
    done = speaking(text, PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    written = text.encode(encoding, errors="backslashreplace")
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, b"warning: " + written)
    assert done.stdout.count(written) == 3


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii:surrogateescape"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_every_text_can_be_printed_in_the_locale_c(variables: dict[str, str]) -> None:
    done = speaking("caf\u00e9 \udcff", **variables)
    assert (done.returncode, done.stdout.count(b"caf\\xe9 \\udcff")) == (0, 3)
    assert done.stderr.splitlines()[0] == b"warning: caf\\xe9 \\udcff"


def test_closed_pipe_is_no_error() -> None:
    """As in ``trtllm-replayssm doctor | head -1``, with more output than the pipe takes."""
    program = (
        "import sys\n"
        "from trtllm_replayssm.cli import doctor, main\n"
        "doctor.run = lambda args: [print('x' * 1000) for line in range(1000)]\n"
        "sys.exit(main.main(['doctor']))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(60) == cli_main.EXIT_BROKEN_PIPE


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Runs ``doctor`` with an exception in it; returns the exit status."""

    def call(error: BaseException, *options: str) -> int:
        def fail(args: Namespace) -> int:
            raise error

        monkeypatch.setattr(doctor, "run", fail)
        return main(["doctor", *options])

    return call


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UserError("it is wrong", "do it right"), 1, "error: it is wrong\nhint: do it right\n"),
        (UserError("it is wrong"), 1, "error: it is wrong\n"),
        (
            OSError(28, "No space left on device", "out/rank0.engine"),
            1,
            "error: No space left on device: out/rank0.engine\n",
        ),
        (MemoryError(), 1, "error: this machine has not enough memory for that\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_exceptions_become_lines(
    error: BaseException, status: int, text: str, failing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(error) == status
    assert capsys.readouterr().err == text


def test_fault_of_the_program_names_its_type_and_the_way_to_see_more(
    failing: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(ZeroDivisionError("division\nby zero")) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "error: unexpected ZeroDivisionError: division by zero"
    assert "--log_level debug" in hint
    assert failing(ZeroDivisionError("again"), "--log_level", "debug") == 3
    assert "Traceback" in capsys.readouterr().err


def test_log_level_decides_what_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def speak(args: Namespace) -> int:
        log = logging.getLogger("trtllm_replayssm.somewhere")
        log.debug("detail")
        log.info("news")
        log.warning("careful")
        with console.byte_progress("working") as report:
            report(1, 2, "file")
        return 0

    monkeypatch.setattr(doctor, "run", speak)
    said = {}
    for level in ("error", "warning", "info", "debug"):
        assert main(["doctor", "--log_level", level]) == 0
        said[level] = [line.partition(" in ")[0] for line in capsys.readouterr().err.splitlines()]
    assert said["error"] == []
    assert said["warning"] == ["warning: careful"]
    assert said["info"] == ["news", "warning: careful", "working: done"]
    assert said["debug"] == ["debug: trtllm_replayssm.somewhere: detail", *said["info"]]


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console.start_logging("info")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with console.byte_progress("copying") as report:
        report(2**20, 4 * 2**20, "rank0.safetensors")
    assert "copying: done" in capsys.readouterr().err


def test_replay_options_have_the_defaults_of_replay_config() -> None:
    parser = ArgumentParser()
    add_replay_arguments(parser)
    assert replay_config(parser.parse_args([])) == ReplayConfig()
    given = ["--replay_window", "8", "--max_draft_len", "3", "--state_dtype", "bfloat16"]
    given += ["--ring_dtype", "float16", "--replay_fold", "derived"]
    assert replay_config(parser.parse_args(given)) == ReplayConfig(8, 3, "bfloat16", "float16", "derived")
    with pytest.raises(UserError, match="replay_window is 65"):
        replay_config(parser.parse_args(["--replay_window", "65"]))


def test_overriding_options_leave_the_rest_as_it_was() -> None:
    parser = ArgumentParser()
    add_replay_arguments(parser, overriding=True)
    stored = ReplayConfig(window=8, max_draft_len=5)
    assert replay_config(parser.parse_args([]), stored) == stored
    assert replay_config(parser.parse_args(["--max_draft_len", "0"]), stored) == ReplayConfig(window=8)


def test_empty_path_is_not_the_current_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """``--output_dir "$UNSET"`` must not write where the user happens to be."""
    with pytest.raises(SystemExit) as end:
        main(["convert", "--model_dir", "model", "--output_dir", ""])
    assert end.value.code == 2
    assert "--output_dir: is empty" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-1", str(2**31), "1" + 30 * "0"])
@pytest.mark.parametrize(
    "command",
    [
        ["convert", "--model_dir", "m", "--output_dir", "o"],
        ["inspect", "m"],
        ["tune", "--synthetic_config", "m"],
        ["bench", "--synthetic_config", "m"],
    ],
    ids=lambda command: command[0],
)
def test_numbers_of_ranks_that_cannot_be(command: list[str], size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--tp_size", size]) == 1
    assert capsys.readouterr().err.startswith("error: --tp_size is ")


def test_every_count_of_a_list_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--synthetic_config", "m", "--decode_batch_sizes", "1", "-2", "3"]) == 1
    assert capsys.readouterr().err == "error: --decode_batch_sizes is -2; it must be 1 or more\n"


def test_a_count_fits_into_32_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--engine_dir", "x", "--time_slice", "2147483648"]) == 1
    assert capsys.readouterr().err == "error: --time_slice is 2147483648; it must be 2147483647 or less\n"


def test_pipeline_parallelism_is_refused_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--model_dir", "/nowhere", "--output_dir", "/nowhere2", "--pp_size", "2"]) == 1
    assert "pipeline parallelism is not supported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (135 * 2**20, "135 MiB"),
        (2**40, "1.00 TiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_text(size: int, text: str) -> None:
    assert console.bytes_text(size) == text


def test_count_text() -> None:
    assert [console.count_text(n) for n in (7, 1500, 31_577_937_344)] == ["7", "1.50 K", "31.6 B"]


def test_tables_align_figures_and_hide_empty_headings(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_table("Title", ("", ""), [("a", "1 MiB"), ("bb", "10 MiB")])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Title"
    assert [line for line in lines if "MiB" in line] == ["  a     1 MiB", "  bb   10 MiB"]
    assert not any("─" in line for line in lines)


def test_tables_are_as_wide_as_columns_says_and_cut_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "pip install --index-url https://example.org/a/rather/long/address/of/an/index"
    monkeypatch.setenv("COLUMNS", "40")
    console.print_table("Title", ("", ""), [("one", command)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join("".join(line.split()) for line in lines) == "Titleone" + command.replace(" ", "")
    monkeypatch.delenv("COLUMNS")
    console.print_table("Title", ("", ""), [("one", command)])
    assert command in capsys.readouterr().out


def test_table_into_a_closed_pipe_is_quiet() -> None:
    program = (
        "import sys\n"
        "from trtllm_replayssm import console\n"
        "from trtllm_replayssm.cli import doctor, main\n"
        "rows = [('x' * 100, 'y')] * 2000\n"
        "doctor.run = lambda args: console.print_table('Title', ('', ''), rows)\n"
        "sys.exit(main.main(['doctor']))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(60) == cli_main.EXIT_BROKEN_PIPE


def test_no_color_means_no_escape_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    console.print_table("Title", ("a", "b"), [("1", "2")])
    assert "\x1b[" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    console.print_table("Title", ("a", "b"), [("1", "2")])
    assert "\x1b" not in capsys.readouterr().out
