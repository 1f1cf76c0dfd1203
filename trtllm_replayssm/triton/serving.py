"""``serve``: a repository, a Triton server on it, and OpenAI's interface before it, until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trtllm_replayssm.errors import EngineError, UserError, pip_extra
from trtllm_replayssm.triton.installation import find_server
from trtllm_replayssm.triton.options import ServingOptions
from trtllm_replayssm.triton.repository import TEXT_MODEL, TOKEN_MODEL, write_repository
from trtllm_replayssm.triton.server import LOG_HINT, Ports, TritonServer, choose_ports

log = logging.getLogger(__name__)

#: What ends a server in the ordinary way.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds between looks whether the Triton server is still there.
WATCH_PERIOD = 0.5
#: A server that was started again and lives no longer than so many seconds, so many times in a row, is given up: it will not
#: live the next time, and whoever keeps ``serve`` running is to know.
SHORT_LIFE, SHORT_LIVES = 10.0, 3
#: Seconds in which the front may tell its clients that the server has ended. No text runs any more, and a client that has sent
#: half a request is not waited for. aiohttp waits as long once more when it has cancelled them, and for ever if it is 0.
LAST_ANSWERS = 1.0


@dataclass(frozen=True)
class Deployment:
    """What ``serve`` was asked for. ports: of http, grpc, metrics and openai; 0 for a free one. model: name for OpenAI's
    clients. tritonserver: the program, or None to look for it."""

    options: ServingOptions
    host: str
    ports: Mapping[str, int]
    model: str
    tritonserver: Path | None = None
    startup_timeout: float = 600.0
    exit_timeout: int = 5
    triton_options: tuple[str, ...] = ()
    verbose: bool = False


def serve(deployment: Deployment, work_folder: Path) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; returns 0 then, when nothing is left running.

    Raises UserError or EngineError when the server cannot be started, or ends by itself.
    """
    engine = Path(deployment.options.engine_dir)
    with_text = (engine / "tokenizer.json").is_file()
    if with_text:
        check_front(engine)
    # The front's gRPC would act in the server's process, between fork and exec, when that is started again.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    repository = work_folder / "models"
    write_repository(deployment.options, repository)
    installation = find_server(deployment.tritonserver, work_folder)
    wanted = {name: port for name, port in deployment.ports.items() if with_text or name != "openai"}
    chosen = choose_ports(deployment.host, wanted)
    ports = Ports(deployment.host, chosen["http"], chosen["grpc"], chosen["metrics"])
    log.info("loading %s", engine)
    more, exit_timeout, verbose = deployment.triton_options, deployment.exit_timeout, deployment.verbose
    with TritonServer(installation, repository, ports, more, exit_timeout, verbose) as server:
        server.wait_until_ready(deployment.startup_timeout)
        asyncio.run(attend(server, deployment, engine, chosen.get("openai")))
    log.info("stopped")
    return 0


def check_front(engine: Path) -> None:
    """Raises UserError where OpenAI's interface could not be served: before an engine is loaded, which may take minutes."""
    if missing := [name for name in ("aiohttp", "tritonclient") if find_spec(name) is None]:
        raise UserError(f"OpenAI's interface needs {missing[0]}, which is not installed", pip_extra("serve"))
    from trtllm_replayssm.runtime.tokenizer import Tokenizer
    from trtllm_replayssm.triton.openai.chat import ChatTemplate

    Tokenizer(engine)
    ChatTemplate(engine)


async def attend(server: TritonServer, deployment: Deployment, engine: Path, openai_port: int | None) -> None:
    """Serve OpenAI's interface, where there is one, until a signal comes. Raises EngineError when Triton ends by itself."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, stop.set)
    async with nullcontext() if openai_port is None else front(server, deployment, engine, openai_port, stop):
        announce(server.ports, openai_port, deployment.model)
        await watch(server, stop, deployment.startup_timeout)
        # While the loop takes signals, a second of which must not end us half-way; and before the front ends, which can tell
        # its clients then what has become of their requests.
        await asyncio.to_thread(server.close)


@asynccontextmanager
async def front(
    server: TritonServer, deployment: Deployment, engine: Path, port: int, stop: asyncio.Event
) -> AsyncIterator[None]:
    """OpenAI's interface, as long as the context lasts. stop: set when the server is to end."""
    from aiohttp import web

    from trtllm_replayssm.triton.openai.app import Front
    from trtllm_replayssm.triton.openai.backend import Backend

    backend = Backend(
        f"{server.ports.local}:{server.ports.grpc}", lives=lambda: not stop.is_set() and not server.missing()
    )
    # A handler ends when its client leaves, and its requests with it.
    runner = web.AppRunner(
        Front(engine, deployment.model, backend).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=LAST_ANSWERS,
    )
    try:
        await runner.setup()
        await web.TCPSite(runner, deployment.host, port).start()
        yield
    finally:
        await runner.cleanup()
        await backend.close()


async def watch(server: TritonServer, stop: asyncio.Event, startup_timeout: float) -> None:
    """Until a signal comes, start the server again when it, or the model in it, ends by itself.

    Raises EngineError when that is of no use.
    """
    restarted, short = -math.inf, 0
    while not stop.is_set():
        if not server.lives():
            short = short + 1 if time.monotonic() < restarted + SHORT_LIFE else 0
            if short == SHORT_LIVES:
                raise EngineError(
                    f"the Triton server was started again {short} times and ended within {SHORT_LIFE:g} seconds each time:"
                    f" {server.reason()}",
                    LOG_HINT,
                )
            log.warning("the Triton server or its model has ended (%s) and is started again", server.reason())
            await asyncio.to_thread(server.restart, startup_timeout, stop.is_set)
            if stop.is_set():
                return
            restarted = time.monotonic()
            log.info("ready again")
        try:
            await asyncio.wait_for(stop.wait(), WATCH_PERIOD)
        except asyncio.TimeoutError:
            continue


def announce(ports: Ports, openai_port: int | None, model: str = "") -> None:
    """The addresses, and that they answer."""
    host = f"[{ports.host}]" if ":" in ports.host else ports.host
    log.info("ready: models %s (token ids) and %s (text)", TOKEN_MODEL, TEXT_MODEL)
    log.info("HTTP     http://%s:%d/v2", host, ports.http)
    log.info("gRPC     %s:%d", host, ports.grpc)
    log.info("metrics  http://%s:%d/metrics", host, ports.metrics)
    if openai_port is not None:
        log.info("OpenAI   http://%s:%d/v1, model %s", host, openai_port, model)
    else:
        log.info("no OpenAI interface: the engine has no tokenizer")
