"""The model inside Triton's python backend: one engine, whose slots the requests of all clients share.

Triton hands over requests and goes on; a thread steps the scheduler, another one carries the responses.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

import triton_python_backend_utils as pb_utils

from trtllm_replayssm.console import LOG_LEVELS, LOGGER
from trtllm_replayssm.errors import UserError
from trtllm_replayssm.runtime.files import output_file
from trtllm_replayssm.runtime.outputs import RequestId, Update
from trtllm_replayssm.runtime.request import check_request
from trtllm_replayssm.runtime.stepping import SteppingThread
from trtllm_replayssm.triton import MODEL_FILE_VARIABLE
from trtllm_replayssm.triton.asks import Arrays, asks_to_stop, read_ask
from trtllm_replayssm.triton.delivery import Delivery
from trtllm_replayssm.triton.metrics import Metrics, TritonMeters
from trtllm_replayssm.triton.options import ServingOptions
from trtllm_replayssm.triton.ranks import LeadingScheduler, Ranks
from trtllm_replayssm.triton.replies import Reply, Tensors
from trtllm_replayssm.triton.tensors import INPUTS

#: Exit status of the python backend's process when the engine cannot go on.
EXIT_LOST = 1
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """What the python backend calls; see its documentation for the three methods."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Raises TritonModelException with one sentence when it cannot be."""
        config = json.loads(args["model_config"])
        given = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        try:
            self.start(ServingOptions.from_parameters(given), folder, args["model_name"])
        except UserError as error:
            raise pb_utils.TritonModelException(sentence(error)) from None

    def start(self, options: ServingOptions, folder: Path, name: str) -> None:
        LOGGER.handlers[:] = [TritonLog()]
        LOGGER.setLevel(LOG_LEVELS[options.log_level])
        self.options, self.serving, self.ranks = options, False, None
        self.ranks = Ranks.start(options, folder, lost=self.lost_rank)
        try:
            self.llm = options.load(folder)
            self.llm.session.warm_up()
        except BaseException:
            if self.ranks is not None:
                self.ranks.close()
            raise
        scheduler = self.llm.scheduler
        self.metrics = Metrics(scheduler)
        self.meters = TritonMeters(pb_utils, {"model": name})
        self.stepping = SteppingThread(
            scheduler if self.ranks is None else LeadingScheduler(scheduler, self.ranks),
            self.metrics.after_step,
            None if self.ranks is None else self.lost_rank,
        )
        self.delivery = Delivery(
            self.stepping.cancel,
            self.finished,
            lambda: self.metrics.export(self.meters),
            options.cancellation_check_period_ms / 1e3,
        )
        #: Running requests by the id that their client gave them; ``execute`` and the delivery thread both change it.
        self.named: dict[str, set[RequestId]] = {}
        self.lock = Lock()
        self.ids = count()
        self.stepping.start()
        self.delivery.start()
        self.serving = True
        if file := os.environ.get(MODEL_FILE_VARIABLE):
            with output_file(Path(file)) as opened:
                ranks = () if self.ranks is None else self.ranks.processes
                opened.write(" ".join(map(str, (os.getpid(), *(rank.pid for rank in ranks)))).encode())

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            channel = TritonChannel(request)
            try:
                self.take(request, channel)
            except UserError as error:
                self.metrics.rejected()
                channel.fail(error)
            except Exception as error:
                # One client's request must not end the others'.
                LOGGER.error("a request could not be read: %s", error, exc_info=True)
                self.metrics.rejected()
                channel.fail(error)

    def take(self, request: Any, channel: TritonChannel) -> None:
        """Start what a request asks for. Raises UserError when it cannot be."""
        arrays, client_id = input_arrays(request), request.request_id()
        if asks_to_stop(arrays):
            with self.lock:
                same = tuple(self.named.get(client_id, ()))
            for request_id in same:
                self.stepping.cancel(request_id)
            channel.finish()
            return
        ask = read_ask(arrays, self.options.exclude_input_in_output, lambda ids: self.llm.tokenizer.decode(ids, False))
        # Clients know nothing of our numbers.
        made = self.llm.request(next(self.ids), ask.text, ask.token_ids, ask.params, ask.draft_ids, name="the prompt")
        check_room(self.llm.engine.config.max_seq_len, len(made.prompt), ask.params.max_tokens)
        check_request(self.llm.engine, made)
        if client_id:
            with self.lock:
                self.named.setdefault(client_id, set()).add(made.request_id)
        self.delivery.add(Reply(ask, made, self.metrics.arrived(made.request_id), client_id), channel)
        self.stepping.submit(made, self.delivery.put)

    def finished(self, reply: Reply, update: Update) -> None:
        """Forget a request that has ended."""
        self.metrics.finished(reply.request, update)
        if not reply.client_id:
            return
        with self.lock:
            same = self.named[reply.client_id]
            same.discard(reply.request.request_id)
            if not same:
                del self.named[reply.client_id]

    def lost_rank(self, error: Exception) -> None:
        """Another rank is gone, and with it the engine: tell the clients, and end. ``serve`` starts everything again."""
        LOGGER.error("%s; the model ends", error)
        if self.serving:
            self.delivery.fail_all(error)
        if self.ranks is not None:
            self.ranks.remove_folder()
        os._exit(EXIT_LOST)

    def finalize(self) -> None:
        self.stepping.close()
        self.delivery.close()
        if self.ranks is not None:
            self.ranks.close()


class TritonChannel:
    """The way back to one client of Triton."""

    def __init__(self, request: Any) -> None:
        self.request, self.sender = request, request.get_response_sender()

    def send(self, tensors: Tensors, final: bool) -> None:
        response = pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])
        self.sender.send(response, flags=FINAL if final else 0)

    def fail(self, error: Exception) -> None:
        code = pb_utils.TritonError.INVALID_ARG if isinstance(error, UserError) else pb_utils.TritonError.INTERNAL
        response = pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence(error), code))
        self.sender.send(response, flags=FINAL)

    def finish(self) -> None:
        """The last response, which says nothing."""
        self.sender.send(flags=FINAL)

    def is_cancelled(self) -> bool:
        return bool(self.request.is_cancelled())


class TritonLog(logging.Handler):
    """Log records of the package in Triton's log."""

    def emit(self, record: logging.LogRecord) -> None:
        log = pb_utils.Logger
        write = (
            log.log_error
            if record.levelno >= logging.ERROR
            else log.log_warn
            if record.levelno >= logging.WARNING
            else log.log_info
        )
        write(self.format(record))


def input_arrays(request: Any) -> Arrays:
    """The request's input tensors by name."""
    tensors = ((spec.name, pb_utils.get_input_tensor_by_name(request, spec.name)) for spec in INPUTS)
    return {name: tensor.as_numpy() for name, tensor in tensors if tensor is not None}


def check_room(longest: int, prompt: int, output: int) -> None:
    """Raises UserError when prompt and output together do not fit a slot."""
    if prompt + output > longest:
        raise UserError(f"{prompt} prompt tokens and {output} output tokens are more than max_seq_len {longest}")


def sentence(error: Exception) -> str:
    """What a client is told."""
    if isinstance(error, UserError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
