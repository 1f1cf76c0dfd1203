"""Checks that the fields of a dataclass read from JSON have the types that its annotations promise."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_types(item: Any) -> None:
    """Raises ValueError, naming class and field, for the first field of ``item`` or its parts that has another type."""
    hints = get_type_hints(type(item))
    for field in fields(item):
        value = getattr(item, field.name)
        if not fits(value, hints[field.name]):
            raise ValueError(f"{field.name} of {type(item).__name__} is {value!r}")


def damage(error: Exception) -> str:
    """What is wrong with the JSON whose reading raised ``error``, without the words of Python.

    Only what raises ValueError or UserError has a sentence of its own.
    """
    if isinstance(error, KeyError):
        return f"it has no {error}"
    if isinstance(error, ZeroDivisionError):
        return "a size in it is 0"
    if isinstance(error, TypeError | AttributeError):
        return "it has parts of other types or names than this version writes"
    return str(error)


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of type ``hint``: a class, a Literal, a union, a tuple of any length, or a dict."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin in (Union, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(part, args[0]) for part in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(k, args[0]) and fits(part, args[1]) for k, part in value.items())
    if is_dataclass(value):
        check_types(value)
        return isinstance(value, hint)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
