"""TensorRT under observation: which members of its classes are asked for while a network is made, and that they exist.

The objects are TensorRT-RTX's, which can make networks anywhere; the members that they show are those of another TensorRT.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from trtllm_replayssm.compat import Features, TensorRT

#: Objects that are watched; what else TensorRT returns is values.
WATCHED = ("INetworkDefinition", "Builder", "IBuilderConfig", "IOptimizationProfile", "ITensor")


@dataclass
class Watch:
    """genuine: the module whose members there are. asked: (class or ``module``, member) of all that was read or set."""

    genuine: ModuleType
    asked: set[tuple[str, str]] = field(default_factory=set)
    #: By identity, so that one object of TensorRT is one object here; the objects are kept, so that no identity returns.
    seen: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def tensorrt(self, real: TensorRT, features: Features) -> TensorRT:
        """The same TensorRT, watched, as if it were the flavour ``tensorrt`` with these features."""
        return replace(real, module=WatchedModule(self, real.module), flavour="tensorrt", features=features)

    def ask(self, owner: str, member: str) -> None:
        """Raises AttributeError for a member that the genuine module lacks, as it would itself."""
        target = self.genuine if owner == "module" else getattr(self.genuine, owner)
        if not hasattr(target, member):
            raise AttributeError(f"{owner}.{member} is not in TensorRT {self.genuine.__version__}")
        self.asked.add((owner, member))

    def shown(self, value: Any) -> Any:
        """The value, watched if it is an object of a network or its builder, or a function that returns one."""
        kind = type(value).__name__
        if kind in WATCHED or kind.endswith("Layer") or kind == "IAttention":
            if id(value) not in self.seen:
                self.seen[id(value)] = value, WatchedObject(self, value)
            return self.seen[id(value)][1]
        return self.function(value) if callable(value) and not isinstance(value, type) else value

    def function(self, real: Callable) -> Callable:
        return lambda *args, **kwargs: self.shown(
            real(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})
        )


class WatchedObject:
    def __init__(self, watch: Watch, real: Any) -> None:
        vars(self).update(watch=watch, real=real)

    def __getattr__(self, name: str) -> Any:
        self.watch.ask(type(self.real).__name__, name)
        return self.watch.shown(getattr(self.real, name))

    def __setattr__(self, name: str, value: Any) -> None:
        self.watch.ask(type(self.real).__name__, name)
        setattr(self.real, name, plain(value))


class WatchedClass:
    """A class or enumeration of the module."""

    def __init__(self, watch: Watch, real: type) -> None:
        self.watch, self.real = watch, real

    def __getattr__(self, name: str) -> Any:
        self.watch.ask(self.real.__name__, name)
        return getattr(self.real, name)

    def __call__(self, *args: Any) -> Any:
        return self.watch.shown(self.real(*map(plain, args)))


class WatchedModule:
    def __init__(self, watch: Watch, real: Any) -> None:
        self.watch, self.real = watch, real

    def __getattr__(self, name: str) -> Any:
        self.watch.ask("module", name)
        value = getattr(self.real, name)
        return WatchedClass(self.watch, value) if isinstance(value, type) else value


def plain(value: Any) -> Any:
    """TensorRT's own object, inside lists and tuples as well."""
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value.real if isinstance(value, WatchedObject) else value
