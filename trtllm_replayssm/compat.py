"""Which TensorRT is installed, and what it can do. Every test of version or flavour lives here.

Two flavours have the same Python API: ``tensorrt`` (10.14 to 11.x), which runs engines with plugin layers on data-centre
GPUs, and ``tensorrt_rtx``, which builds on any machine, without a GPU, but has no plugin layers. A third, ``recording``,
is this package's own and builds nothing (network/tensorrt/recording.py). Features are looked for where they are, not
guessed from version numbers.
"""

from __future__ import annotations

import gc
import importlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing  # tensorrt.plugin reads np.typing, which numpy 1 has only once it was imported
import torch

from trtllm_replayssm.errors import EngineError, pip_extra

Flavour = Literal["tensorrt", "tensorrt_rtx", "recording"]

#: First supported version of ``tensorrt`` and the first that is not supported any more.
FIRST_VERSION, END_VERSION = (10, 14), (12, 0)
#: Modules that hold each flavour; the second is what the wheels without a redistributing package install.
MODULES: dict[Flavour, tuple[str, ...]] = {
    "tensorrt": ("tensorrt",),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
PACKAGES: dict[Flavour, str] = {
    "tensorrt": pip_extra("tensorrt"),
    "tensorrt_rtx": "pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings",
}
#: From this NumPy on, an array of one element is no number; from this TensorRT on, its plugin module knows that.
NUMPY_STRICT, NUMPY_FIXED = (2, 4), (11, 2)
#: Compute capabilities (major) on which the native mixture-of-experts layer exists.
MOE_CAPABILITIES = (10, 11)
#: First compute capability whose engines hold numbers of these dtypes.
FIRST_CAPABILITIES = {torch.float8_e4m3fn: (8, 9), torch.float4_e2m1fn_x2: (10, 0)}


@dataclass(frozen=True)
class Features:
    """What the network API of a TensorRT offers beyond 10.14.

    kv_cache_update: a layer that writes keys and values into their cache in place (10.15). attention_lengths: attention
    stops at each row's own length (11.0). moe: mixture-of-experts layer (10.16; only on MOE_CAPABILITIES). collective:
    sums and gathers over ranks (10.16, for engines 11.0). plugins: plugin layers can be added. aliases: an engine tells
    which output shares its address with which input (10.15).
    """

    kv_cache_update: bool
    attention_lengths: bool
    moe: bool
    collective: bool
    plugins: bool
    aliases: bool


@contextmanager
def collector_paused() -> Iterator[None]:
    """Around calls of TensorRT that may log: it reports under a lock that its objects need in order to go.

    A cyclic collection inside the report that finds one of them would wait for this lock for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class TensorRT:
    """An installed TensorRT. module: ``tensorrt`` or ``tensorrt_rtx``; layers and enumerations are taken from it."""

    module: ModuleType
    flavour: Flavour
    version: tuple[int, ...]
    features: Features

    @classmethod
    def of(cls, module: ModuleType, flavour: Flavour) -> TensorRT:
        """Describe an imported module. Raises EngineError when its version is not supported."""
        version = tuple(int(n) for n in re.findall(r"\d+", module.__version__)[:4])
        if flavour == "tensorrt" and not FIRST_VERSION <= version[:2] < END_VERSION:
            raise EngineError(
                f"TensorRT {module.__version__} is not supported; this package works with 10.14 to 11.x",
                PACKAGES[flavour],
            )
        network = getattr(module, "INetworkDefinition", object)
        features = Features(
            kv_cache_update=hasattr(network, "add_kv_cache_update"),
            attention_lengths=hasattr(getattr(module, "IAttention", object), "key_value_lengths"),
            moe=hasattr(network, "add_moe"),
            collective=hasattr(network, "add_dist_collective") and (flavour != "tensorrt" or version >= (11,)),
            plugins=hasattr(network, "add_plugin_v3"),
            aliases=hasattr(module.ICudaEngine, "get_aliased_input_tensor"),
        )
        return cls(module, flavour, version, features)

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))

    def builder(self, log: Any) -> Any:
        """A builder that reports to ``log``. Raises EngineError where TensorRT cannot build, as without a GPU."""
        try:
            with collector_paused():
                return self.module.Builder(log)
        except TypeError:
            # What the bindings make of a null pointer.
            raise EngineError(
                f"TensorRT {self.version_text} cannot build engines on this machine",
                "it needs an NVIDIA GPU and its driver; --dry_run and --engine_flavour embedded do not",
            ) from None

    def dtype(self, dtype: torch.dtype) -> Any:
        """TensorRT's name of a torch dtype."""
        return getattr(self.module, TYPE_NAMES[dtype])

    def torch_dtype(self, dtype: Any) -> torch.dtype:
        """torch's name of a TensorRT dtype."""
        return next(known for known in TYPE_NAMES if self.dtype(known) == dtype)

    def weights(self, memory: torch.Tensor) -> Any:
        """A tensor's own memory as TensorRT describes it; it must live as long as what is made of it."""
        count = value_count(memory.dtype, memory.numel())
        return self.module.Weights(self.dtype(memory.dtype), memory.data_ptr(), count)

    def check_numpy(self, numpy_version: str = np.__version__) -> None:
        """Raises EngineError when this TensorRT's plugin module cannot read numbers from this NumPy's arrays."""
        found = tuple(int(n) for n in re.findall(r"\d+", numpy_version)[:2])
        if self.version < NUMPY_FIXED and found >= NUMPY_STRICT:
            raise EngineError(
                f"TensorRT {self.version_text} does not work with NumPy {numpy_version}",
                "pip install 'numpy<2.4', or use TensorRT 11.2 or later",
            )

    def create_network(self, builder: Any) -> Any:
        """An empty strongly typed network, the only kind from 11.0 on."""
        return builder.create_network(1 << int(self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    def set_capability(self, config: Any, capability: tuple[int, int] | None) -> None:
        """Build for a GPU that need not be there. ``tensorrt`` builds for the one at hand whatever is asked.

        Raises EngineError for a GPU that ``tensorrt_rtx`` does not know by name.
        """
        if self.flavour != "tensorrt_rtx":
            return
        known = self.module.ComputeCapability.__members__
        name = "CURRENT" if capability is None else "SM{}{}".format(*capability)
        if name not in known:
            named = sorted(n.removeprefix("SM") for n in known if n.startswith("SM"))
            raise EngineError(
                f"tensorrt_rtx does not build for compute capability {name.removeprefix('SM')}",
                f"it knows {', '.join(named)}, and the GPU at hand",
            )
        config.num_compute_capabilities = 1
        config.set_compute_capability(known[name], 0)

    def add_attention(self, network: Any, query: Any, key: Any, value: Any) -> Any:
        """A fused attention layer with softmax and without a causal rule; the caller sets the mask."""
        trt = self.module
        if hasattr(network, "add_attention_v2"):
            none = trt.CausalMaskKind.NONE
            return network.add_attention_v2(query, key, value, trt.AttentionNormalizationOp.SOFTMAX, none)
        return network.add_attention(query, key, value, trt.AttentionNormalizationOp.SOFTMAX, False)


TYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.int8: "int8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "fp8",
    torch.float4_e2m1fn_x2: "fp4",
}


def value_count(dtype: torch.dtype, elements: int) -> int:
    """Numbers in so many elements of torch's; TensorRT counts the numbers."""
    return elements * 2 if dtype == torch.float4_e2m1fn_x2 else elements


def load_tensorrt(flavours: Sequence[Flavour] = ("tensorrt", "tensorrt_rtx")) -> TensorRT:
    """The first installed flavour of ``flavours``.

    Raises EngineError when none is installed, when its libraries cannot be loaded, or when its version is not supported.
    """
    reasons = []
    for flavour in flavours:
        for name in MODULES[flavour]:
            try:
                module = importlib.import_module(name)
                # Any folder of that name can be imported, and is empty.
                if hasattr(module, "__version__"):
                    return TensorRT.of(module, flavour)
            except (ImportError, OSError) as error:
                # A missing module is the usual case; a missing library is worth telling.
                if not (isinstance(error, ModuleNotFoundError) and error.name == name):
                    reasons.append(f"{name}: {error}")
    wanted = " or ".join(flavours)
    detail = f" ({'; '.join(reasons)})" if reasons else ""
    raise EngineError(f"{wanted} is not installed{detail}", PACKAGES[flavours[0]])
