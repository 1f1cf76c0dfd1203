"""Chats with a served engine through OpenAI's own client (pip install openai).

Usage: python openai_client.py MESSAGE [BASE_URL]    (by default http://localhost:9000/v1)
"""

from __future__ import annotations

import sys

from openai import APIConnectionError, BadRequestError, OpenAI


def main(message: str, base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none")
    try:
        model = client.models.list().data[0].id
    except APIConnectionError as error:
        raise SystemExit(f"error: no server at {base_url}: {error}") from None
    try:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": message}],
            max_completion_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
    except BadRequestError as error:
        # Engines whose tokenizer has no chat template continue texts only.
        print(f"no chat: {error.body}", file=sys.stderr)
        answer = client.completions.create(model=model, prompt=message, max_tokens=64)
        print(answer.choices[0].text)
        return
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "http://localhost:9000/v1")
