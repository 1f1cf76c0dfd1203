"""Streams text from a Triton server that ``trtllm-replayssm serve`` has started, by gRPC and by HTTP.

Usage: python triton_client.py PROMPT [--url HOST:PORT] [--protocol grpc|http] [--max_tokens 64] [--temperature 0.8]

Needs tritonclient[grpc] for gRPC (pip install '.[triton]'), and nothing but Python for HTTP.
"""

from __future__ import annotations

import argparse
import json
import queue
import socket
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

MODEL = "ensemble"


def stream_grpc(url: str, values: dict[str, Any]) -> Iterator[str]:
    """One request on a gRPC stream. Leaving the loop early cancels it on the server."""
    import numpy as np
    import tritonclient.grpc as triton

    types = {
        str: ("BYTES", np.object_),
        bool: ("BOOL", np.bool_),
        int: ("INT32", np.int32),
        float: ("FP32", np.float32),
    }
    inputs = []
    for name, value in values.items():
        kind, dtype = types[type(value)]
        tensor = triton.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(np.array([[value.encode() if isinstance(value, str) else value]], dtype))
        inputs.append(tensor)
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        # The empty final response, if there is one, tells that the text has ended.
        client.async_stream_infer(MODEL, inputs, enable_empty_final_response=True)
        try:
            final = False
            while not final:
                result, error = results.get()
                if error is not None:
                    raise SystemExit(f"error: {error}")
                text = result.as_numpy("text_output")
                if text is not None:
                    yield text.reshape(-1)[0].decode()
                final = result.get_response().parameters["triton_final_response"].bool_param
        finally:
            client.stop_stream(cancel_requests=True)


def stream_http(url: str, values: dict[str, Any]) -> Iterator[str]:
    """The same by HTTP: server-sent events, one JSON object each."""
    request = urllib.request.Request(
        f"http://{url}/v2/models/{MODEL}/generate_stream",
        json.dumps(values).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                data = json.loads(line[len(b"data: ") :])
                if "error" in data:
                    raise SystemExit(f"error: {data['error']}")
                yield data["text_output"]


def check_connection(url: str) -> None:
    """Ends with one sentence when nobody listens there."""
    host, _, port = url.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: no server at {url}: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--url", help="by default localhost:8001 for gRPC and localhost:8000 for HTTP")
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="greedy without one")
    args = parser.parse_args()
    values: dict[str, Any] = {"text_input": args.prompt, "max_tokens": args.max_tokens, "stream": True}
    if args.temperature is not None:
        values["temperature"] = args.temperature
    stream, port = (stream_grpc, 8001) if args.protocol == "grpc" else (stream_http, 8000)
    url = args.url or f"localhost:{port}"
    check_connection(url)
    for piece in stream(url, values):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()


if __name__ == "__main__":
    main()
