"""Messages of a chat as one prompt, by the template that came with the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.triton.openai.generation_tag import GenerationTag

CONFIG = "tokenizer_config.json"
#: Keys of tokenizer_config.json that templates know as variables.
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
HINT = "copy it from the model's folder again, or remove it: without it the engine answers completions, and chats are refused"


class ChatTemplate:
    """The chat template of an engine folder: chat_template.jinja, or the one in tokenizer_config.json."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError for files that cannot be read; a folder without a template is found out by ``prompt``."""
        config = read_config(folder / CONFIG)
        file = folder / "chat_template.jinja"
        try:
            # utf-8-sig: editors on Windows begin a file with a mark.
            own = file.read_text(encoding="utf-8-sig") if file.is_file() else None
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read: {error}", HINT) from None
        source = default_template(config.get("chat_template")) if own is None else own
        try:
            self.variables = {name: token_text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        except KeyError as error:
            raise UserError(f"{folder / CONFIG} has a special token without {error}", HINT) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
        )
        environment.filters["tojson"] = to_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": strftime_now}
        try:
            self.template = None if source is None else environment.from_string(source)
        except (TemplateSyntaxError, SyntaxError, ValueError, RecursionError) as error:
            where = file if own is not None else folder / CONFIG
            raise UserError(f"the chat template in {where} is broken: {flaw(error)}", HINT) from None

    def prompt(self, messages: Sequence[dict[str, Any]], more: dict[str, Any]) -> str:
        """The text that the assistant's answer follows. more: further variables of the template.

        Raises UserError for messages that cannot be, or that the template refuses.
        """
        if self.template is None:
            raise UserError("the model's tokenizer has no chat template", "use /v1/completions")
        plain = [plain_message(i, message) for i, message in enumerate(messages)]
        variables = {"add_generation_prompt": True, "tools": None, "documents": None} | self.variables | more
        try:
            return self.template.render(messages=plain, **variables)
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise UserError(f"the model's chat template refuses these messages: {error}") from None


def plain_message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string. Raises UserError for anything but text."""
    if not isinstance(message.get("role"), str):
        raise UserError(f"message {place} has no role")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise UserError(f"message {place} holds something else than text")
        texts.append(text)
    return message | {"content": "".join(texts)}


def read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}", HINT) from None
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no JSON object", HINT)
    return data


def default_template(value: Any) -> str | None:
    """The template of tokenizer_config.json, which may hold several by name."""
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        value = {entry["name"]: entry.get("template") for entry in entries}.get("default")
    return value if isinstance(value, str) else None


def flaw(error: Exception) -> str:
    """What is wrong with a template. SyntaxError: of the code that jinja makes of it, whose lines are not the template's."""
    if isinstance(error, TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, SyntaxError) else str(error)


def token_text(token: Any) -> str:
    """A special token, which may be an object with its properties."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def to_json(value: Any, indent: int | None = None) -> str:
    """As templates expect it: characters as they are, where jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def refuse(message: str) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
