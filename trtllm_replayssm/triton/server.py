"""A Triton server as a child of this process: started, waited for, and ended with everything that it started."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from urllib.error import URLError
from urllib.request import urlopen

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.signals import signal_name
from trtllm_replayssm.triton import MODEL_FILE_VARIABLE
from trtllm_replayssm.triton.installation import Installation
from trtllm_replayssm.triton.log import ServerLog

log = logging.getLogger(__name__)

#: Seconds that the server gets to end after those that running requests get. It gives up by itself then, and may hang.
KILL_AFTER = 2.0
#: Seconds in which a model that has lost a rank may tell its clients, and in which a server without its model may hand on what
#: that has told.
LAST_WORDS, HANDED_ON = 5.0, 2.0
HOST_HINT = "give an address of this machine, or 0.0.0.0 for all of them"
LOG_HINT = "add --log_level debug to see the server's log"
SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ports:
    """Where a server listens. host: address of the interface; 0.0.0.0 for all."""

    host: str
    http: int
    grpc: int
    metrics: int

    @property
    def local(self) -> str:
        """A host under which this machine reaches it."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host


def choose_ports(host: str, wanted: Mapping[str, int]) -> dict[str, int]:
    """The wanted ports, a free one in place of 0. Raises UserError when one cannot be had."""
    chosen: dict[str, int] = {}
    held = []
    try:
        for name, port in wanted.items():
            if not 0 <= port < 1 << 16:
                raise UserError(f"--{name}_port is {port}; ports are 0 to {(1 << 16) - 1}")
            if port in chosen.values():
                raise UserError(f"--{name}_port is {port}, which another option has too")
            probe = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            held.append(probe)
            # A port whose last connections are still being closed may be had.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen()
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    raise UserError(f"--host {host} cannot be listened at: {reason}", HOST_HINT) from None
                raise UserError(
                    f"port {port} of {host} cannot be used: {reason}",
                    f"choose another with --{name}_port, or 0 for any",
                ) from None
            chosen[name] = probe.getsockname()[1]
    finally:
        for probe in held:
            probe.close()
    return chosen


class TritonServer:
    """A running server; ``with`` ends it."""

    def __init__(
        self,
        installation: Installation,
        repository: Path,
        ports: Ports,
        more: Sequence[str] = (),
        exit_timeout: int = 5,
        verbose: bool = False,
    ) -> None:
        """more: further options of tritonserver. exit_timeout: seconds that running requests get when it is ended. verbose:
        show its log. Raises UserError when it cannot be started.
        """
        self.ports, self.exit_timeout, self.verbose = ports, exit_timeout, verbose
        #: Two servers of one machine must not share memory.
        self.prefix = f"trtllm_replayssm_{os.getpid()}_{time.monotonic_ns()}_"
        #: Where the model writes the ids of its process and of its ranks'.
        self.model_file = repository.parent / "model.pid"
        #: When a rank was first missed, in seconds of the monotonic clock.
        self.missed: float | None = None
        #: Whether nothing is left of it.
        self.closed = True
        self.environment = {**os.environ, **installation.environment, MODEL_FILE_VARIABLE: str(self.model_file)}
        self.log = ServerLog()
        self.command = [
            str(installation.executable),
            f"--model-repository={repository}",
            *(f"--{name}-address={ports.host}" for name in ("http", "grpc", "metrics")),
            f"--http-port={ports.http}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-port={ports.metrics}",
            f"--backend-config=python,shm-region-prefix-name={self.prefix}",
            f"--exit-timeout-secs={exit_timeout}",
            *([] if has_gpu() else ["--allow-gpu-metrics=false"]),
            *installation.options,
            *more,
        ]
        self.start()

    def start(self) -> None:
        """Raises UserError when the program cannot be run."""
        log.debug("%s", " ".join(self.command))
        self.model_file.unlink(missing_ok=True)
        self.missed = None
        self.log.clear()
        try:
            # In a session of its own: signals of the terminal come to us alone, and we end it in good order.
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                # Python's packages are looked for there first, and a checkout is no installed package.
                cwd=self.model_file.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            raise UserError(f"{self.command[0]} cannot be started: {error.strerror or error}") from None
        self.closed = False
        self.reader = Thread(target=self.read, name="tritonserver-log", daemon=True)
        self.reader.start()

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.log.add(line)
            if self.verbose:
                print(line, end="", file=sys.stderr, flush=True)

    def wait_until_ready(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """stopped: whether nobody wants it any more; it is not waited for then.

        Raises EngineError with the server's reason when it ends before it is ready, or takes too long.
        """
        deadline = time.monotonic() + seconds
        while not self.is_ready():
            if stopped():
                return
            if self.process.poll() is not None:
                self.reader.join(1)
                raise EngineError(f"the Triton server could not start: {self.reason()}", LOG_HINT)
            if time.monotonic() > deadline:
                raise EngineError(f"the Triton server was not ready after {seconds:g} seconds", LOG_HINT)
            time.sleep(0.1)
        # What it said on its way is no reason for an end that comes later.
        self.log.clear()

    def is_ready(self) -> bool:
        try:
            with closing(urlopen(f"http://{self.ports.local}:{self.ports.http}/v2/health/ready", timeout=5)) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def reason(self) -> str:
        """Why it ended, by its log."""
        status = self.process.poll()
        if told := self.log.reason():
            return told
        if status is None:
            return f"{'the process' if self.missed is None else 'a rank'} of its model has ended"
        if status < 0:
            return f"it was ended by {signal_name(-status)}"
        return self.log.last_words() or f"it ended with status {status} without a word"

    def missing(self) -> str:
        """What has ended, or is not there yet: "server", "model" or "rank"; empty when everything runs."""
        if self.process.poll() is not None:
            return "server"
        try:
            model, *ranks = self.model_file.read_text().split()
        except OSError:
            return "model"
        if has_ended(model):
            return "model"
        return "rank" if any(map(has_ended, ranks)) else ""

    def lives(self) -> bool:
        """Whether the server runs, and the model in it: Triton does not start a model's process a second time.

        A model that loses a rank tells its clients and ends. One that is still there after ``LAST_WORDS`` seconds cannot,
        and counts as ended.
        """
        missing = self.missing()
        if missing == "rank" and self.missed is None:
            self.missed = time.monotonic()
        return not missing or (missing == "rank" and time.monotonic() < (self.missed or 0) + LAST_WORDS)

    def restart(self, seconds: float, stopped: Callable[[], bool]) -> None:
        """End what is left of it, and start it again with the same ports. stopped and errors: see wait_until_ready."""
        self.close()
        if not stopped():
            self.start()
            self.wait_until_ready(seconds, stopped)

    def close(self) -> None:
        """End the server and every process that it started, and remove what they leave in shared memory.

        Requests get ``exit_timeout`` seconds to end. Where the model is lost, or still being loaded, none can.
        """
        if self.closed:
            # The number of its group may be another's by now.
            return
        try:
            if self.process.poll() is None:
                patience = HANDED_ON if self.missing() else self.exit_timeout + KILL_AFTER
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(patience)
        except subprocess.TimeoutExpired:
            log.debug("the Triton server did not end by itself and was killed")
        finally:
            kill_group(self.process.pid)
        self.process.wait()
        self.reader.join(1)
        for left in SHARED_MEMORY.glob(f"*{self.prefix}*"):
            left.unlink(missing_ok=True)
        self.closed = True


def has_ended(pid: str) -> bool:
    """Whether a process is gone, or a zombie: Triton never asks for one that has ended."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def kill_group(leader: int) -> None:
    """End what is left of a group of processes."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def end_with_parent() -> None:
    """Called in the child: have it ended when the process that started it is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None
