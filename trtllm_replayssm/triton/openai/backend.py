"""A Triton server as the front sees it: prompts go there by gRPC, tokens come back one response after the other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from grpc import RpcError, StatusCode
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.triton.repository import TOKEN_MODEL

#: Options of the channel: messages of any size, and milliseconds between attempts to connect. While a server is started again
#: gRPC would wait longer after each attempt, up to two minutes, and with it the first requests of the new server.
CHANNEL = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class BackendError(Exception):
    """The Triton server has refused a request, or failed at it."""


class UnavailableError(BackendError):
    """There is no server or no model that could answer."""

    def __init__(self, begun: bool) -> None:
        """begun: whether a part of the text has been there."""
        when = " in the middle of the text" if begun else ""
        super().__init__(f"the engine is not there{when}: it is started again, or stopped; ask again later")


@dataclass(frozen=True)
class Piece:
    """What one response brings. finish_reason: of the last one; empty before. top: per token, the likeliest ones' ids and
    log-probabilities."""

    text: str
    token_ids: list[int]
    finish_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class Backend:
    """The model behind a gRPC address."""

    def __init__(self, address: str, lives: Callable[[], bool]) -> None:
        """lives: whether the server's processes are all there. Triton itself notices late that its model's is not."""
        self.client, self.lives = triton.InferenceServerClient(address, channel_args=CHANNEL), lives

    async def close(self) -> None:
        await self.client.close()

    async def is_ready(self) -> bool:
        try:
            return self.lives() and bool(await self.client.is_model_ready(TOKEN_MODEL))
        except InferenceServerException:
            return False

    async def stream(self, token_ids: list[int], params: SamplingParams) -> AsyncIterator[Piece]:
        """The continuation of a prompt, piece by piece. Leaving the loop early cancels the request.

        Raises BackendError.
        """
        given, begun = inputs(token_ids, params), False

        async def request() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": TOKEN_MODEL, "inputs": given}

        responses = self.client.stream_infer(request())
        try:
            async for result, error in responses:
                if error is not None:
                    raise BackendError(error.message()) if self.lives() else UnavailableError(begun)
                piece = read_piece(result)
                yield piece
                if piece.finish_reason:
                    return
                begun = True
            raise UnavailableError(begun)
        except RpcError as error:
            if error.code() == StatusCode.UNAVAILABLE or not self.lives():
                raise UnavailableError(begun) from None
            raise BackendError(error.details()) from None
        except InferenceServerException as error:
            raise BackendError(error.message()) from None
        finally:
            responses.cancel()


def inputs(token_ids: list[int], params: SamplingParams) -> list[triton.InferInput]:
    arrays: dict[str, np.ndarray] = {
        "input_ids": np.asarray([token_ids], np.int32),
        "request_output_len": np.asarray([[params.max_tokens]], np.int32),
        "streaming": np.asarray([[True]]),
        "seed": np.asarray([[params.seed]], np.uint64),
        "temperature": np.asarray([[params.temperature]], np.float32),
    }
    if params.top_k is not None:
        arrays["runtime_top_k"] = np.asarray([[params.top_k]], np.int32)
    if params.top_p is not None:
        # Not 0 by rounding, which clients of TensorRT-LLM send for a top_p that is not wanted.
        arrays["runtime_top_p"] = np.asarray([[max(params.top_p, np.finfo(np.float32).tiny)]], np.float32)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (value := getattr(params, name)) is not None:
            arrays[name] = np.asarray([[value]], np.float32)
    if params.min_tokens:
        arrays["min_tokens"] = np.asarray([[params.min_tokens]], np.int32)
    if params.logprobs is not None:
        arrays["num_log_probs"] = np.asarray([[params.logprobs]], np.int32)
    if params.stop_words:
        arrays["stop_words"] = np.asarray([[word.encode() for word in params.stop_words]], np.object_)
    if params.stop_token_ids:
        ids = list(params.stop_token_ids)
        arrays["stop_words_list"] = np.asarray([[ids, range(1, len(ids) + 1)]], np.int32)
    if params.ignore_eos:
        arrays["end_id"] = np.asarray([[-1]], np.int32)
    made = []
    for name, array in arrays.items():
        tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        made.append(tensor)
    return made


def read_piece(result: Any) -> Piece:
    def array(name: str) -> Any:
        found = result.as_numpy(name)
        return None if found is None else found[0]

    def text(name: str) -> str:
        return str(array(name)[0].decode())

    logprobs, ids, values = array("output_log_probs"), array("top_token_ids"), array("top_log_probs")
    return Piece(
        text("text_output"),
        array("output_ids").reshape(-1).tolist(),
        text("finish_reason"),
        [] if logprobs is None else logprobs[0].tolist(),
        [] if ids is None else [list(zip(*row)) for row in zip(ids[0].tolist(), values[0].tolist())],
    )
