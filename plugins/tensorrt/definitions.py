"""The plugin layers as TensorRT sees them. Tensors and attributes are those of the contracts in ``plugins/``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS
from trtllm_replayssm.plugins.device import advance, causal_conv, delta_rule, gated_delta, kda, mamba2
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.launch import Launch
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.pools import Pool
from trtllm_replayssm.plugins.read_copy import FORMATS, copy_names

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
FLOAT, INT = (torch.float32,), (torch.int32,)


@dataclass(frozen=True)
class Input:
    """One input. dtypes: those it may have. sizes: its sizes, given the attributes; ANY where only the step knows (rows, T).

    like: an earlier input whose dtype it must have. pool: state, which is also an output ``<name>_out``. A pool is
    ``[rows, elements of a slot]``, with the padding that lets a slot be bound; the attributes say how many those are.
    """

    dtypes: tuple[torch.dtype, ...]
    sizes: Callable[[Any], tuple[int, ...]] = lambda a: ()
    like: str | None = None
    pool: bool = False


@dataclass(frozen=True)
class Bound:
    """An input as a launch record needs it. stride: elements from one token, or one slot, to the next."""

    dtype: torch.dtype
    stride: int


@dataclass(frozen=True)
class Definition:
    """One layer. inputs: in the order of the kernel's parameters. result: its first output; its pools follow.

    result_sizes: like Input.sizes. slots: its pools, of any dtypes. tokens_of: the input ``[rows, T, ...]``, whose dtype the
    result has. launch: the launch record for bound inputs, rows and T. fixed: attributes that the layer's name says, and
    that TensorRT is not given.
    """

    name: str
    attributes: type
    inputs: Mapping[str, Input]
    result: str
    result_sizes: Callable[[Any], tuple[int, ...]]
    slots: Callable[[Any], dict[str, Pool]]
    launch: Callable[[Any, Mapping[str, Bound], int, int], Launch]
    tokens_of: str
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(name for name, tensor in self.inputs.items() if tensor.pool)

    def slot_elements(self, attributes: Any, name: str, dtype: torch.dtype) -> int:
        """Elements from one slot of a pool to the next."""
        pool = replace(self.slots(attributes)[name], dtype=dtype)
        return pool.slot_bytes // dtype.itemsize


#: A size that only the running step knows (rows, T).
ANY = -1


def tokens(width: Callable[[Any], int], like: str | None = None) -> Input:
    """Activations ``[rows, T, width]``."""
    return Input(ACTIVATIONS, lambda a: (ANY, ANY, width(a)), like)


def weight(*sizes: Callable[[Any], int], dtypes: tuple[torch.dtype, ...] = FLOAT) -> Input:
    return Input(dtypes, lambda a: tuple(size(a) for size in sizes))


STEP = Input(INT, lambda a: (ANY, STEP_WORDS))
PER_ROW = Input(INT, lambda a: (ANY,))
POOL, FLOAT_POOL, INT_POOL = (Input(dtypes, pool=True) for dtypes in (ACTIVATIONS, FLOAT, INT))


def recurrent_slots(a: Any) -> dict[str, Pool]:
    return a.pools(torch.float32, torch.float32, torch.float32)


def strides(bound: Mapping[str, Bound], *names: str) -> tuple[int, ...]:
    return tuple(bound[name].stride for name in names)


def conv_launch(a: CausalConvAttributes, bound: Mapping[str, Bound], rows: int, count: int) -> Launch:
    dtypes, has_bias = (bound["x"].dtype, bound["weight"].dtype), "bias" in bound
    x_stride, ring_stride = strides(bound, "x", "conv_ring")
    return causal_conv.launch_record(a, *dtypes, has_bias, rows, count, x_stride, ring_stride)


def mamba2_launch(a: Mamba2Attributes, bound: Mapping[str, Bound], rows: int, count: int) -> Launch:
    dtypes = (bound["xbc"].dtype, bound["state"].dtype, bound["ring_x"].dtype)
    moved = strides(bound, "xbc", "dt", "state", "ring_x", "ring_b", "ring_dt", *copy_names(a.read_dtype))
    return mamba2.launch_record(a, *dtypes, rows, count, moved)


def delta_launch(shape_of: Callable[[Any], delta_rule.DeltaShape], *inputs: str) -> Callable[..., Launch]:
    def launch(a: Any, bound: Mapping[str, Bound], rows: int, count: int) -> Launch:
        shape, dtypes = shape_of(a), (bound["qkv"].dtype, bound["state"].dtype, bound["ring_v"].dtype)
        moved = strides(bound, *inputs, *delta_rule.POOLS, *copy_names(a.read_dtype))
        return delta_rule.launch_record(shape, *dtypes, rows, count, moved)

    return launch


def conv_definition(has_bias: bool) -> Definition:
    """A layer has a fixed list of inputs. Without a bias the kernel's parameter is given the taps, and is not read."""
    taps = weight(lambda a: a.channels, lambda a: a.kernel, dtypes=ACTIVATIONS)
    bias = {"bias": Input(ACTIVATIONS, lambda a: (a.channels,), "weight")} if has_bias else {"no_bias": taps}
    return Definition(
        "causal_conv" if has_bias else "causal_conv_without_bias",
        CausalConvAttributes,
        {
            "x": tokens(lambda a: a.channels),
            "weight": taps,
            **bias,
            "step": STEP,
            "conv_ring": replace(POOL, like="x"),
        },
        "y",
        lambda a: (ANY, ANY, a.channels),
        lambda a: a.pools(torch.float32),
        conv_launch,
        "x",
    )


def layer_name(kind: str, attributes: Any) -> str:
    """The layer for these attributes: one that keeps a read copy has another list of inputs, and so another name."""
    read_dtype = getattr(attributes, "read_dtype", "same")
    return kind if read_dtype == "same" else f"{kind}_{read_dtype}"


def with_copies(plain: Definition) -> Iterator[Definition]:
    """The layer, and for one that can keep a read copy also a layer for each format, its pools behind the others."""
    if "read_dtype" not in {f.name for f in fields(plain.attributes)}:
        yield plain
        return
    yield replace(plain, fixed={"read_dtype": "same"})
    for read_dtype, layout in FORMATS.items():
        copies = {name: Input((pool.dtype,), pool=True) for name, pool in layout.pools(1, 1, layout.block).items()}
        name, inputs = f"{plain.name}_{read_dtype}", {**plain.inputs, **copies}
        yield replace(plain, name=name, inputs=inputs, fixed={"read_dtype": read_dtype})


DEFINITIONS = {
    d.name: d
    for plain in (
        Definition(
            "advance",
            AdvanceAttributes,
            {
                "cursors": INT_POOL,
                "slot_ids": PER_ROW,
                "query_lens": PER_ROW,
                "modes": PER_ROW,
                "token_ids": Input(INT, lambda a: (ANY, ANY)),
            },
            "step",
            lambda a: (ANY, STEP_WORDS),
            lambda a: {"cursors": Pool((CURSOR_WORDS,), torch.int32, "cursor")},
            lambda a, bound, rows, count: advance.launch_record(a, rows, count),
            "token_ids",
        ),
        conv_definition(True),
        conv_definition(False),
        Definition(
            "mamba2",
            Mamba2Attributes,
            {
                "xbc": tokens(lambda a: a.num_heads * a.head_dim + 2 * a.n_groups * a.state_size),
                "dt": tokens(lambda a: a.num_heads, like="xbc"),
                "A_log": weight(lambda a: a.num_heads),
                "dt_bias": weight(lambda a: a.num_heads),
                "D": weight(lambda a: a.num_heads),
                "step": STEP,
                "state": POOL,
                "ring_x": POOL,
                "ring_b": POOL,
                "ring_dt": FLOAT_POOL,
            },
            "y",
            lambda a: (ANY, ANY, a.num_heads * a.head_dim),
            recurrent_slots,
            mamba2_launch,
            "xbc",
        ),
        Definition(
            "gated_delta",
            GatedDeltaAttributes,
            {
                "qkv": tokens(lambda a: 2 * a.num_key_heads * a.key_dim + a.num_value_heads * a.value_dim),
                "a": tokens(lambda a: a.num_value_heads, like="qkv"),
                "b": tokens(lambda a: a.num_value_heads, like="qkv"),
                "A_log": weight(lambda a: a.num_value_heads),
                "dt_bias": weight(lambda a: a.num_value_heads),
                "step": STEP,
                "state": POOL,
                "ring_k": POOL,
                "ring_v": POOL,
                "ring_g": FLOAT_POOL,
                "ring_beta": FLOAT_POOL,
            },
            "o",
            lambda a: (ANY, ANY, a.num_value_heads * a.value_dim),
            recurrent_slots,
            delta_launch(gated_delta.shape_of, "qkv", "a", "b"),
            "qkv",
        ),
        Definition(
            "kda",
            KdaAttributes,
            {
                "qkv": tokens(lambda a: a.num_heads * (2 * a.key_dim + a.value_dim)),
                "f": tokens(lambda a: a.num_heads * a.key_dim, like="qkv"),
                "b": tokens(lambda a: a.num_heads, like="qkv"),
                "A_log": weight(lambda a: a.num_heads),
                "dt_bias": weight(lambda a: a.num_heads * a.key_dim),
                "step": STEP,
                "state": POOL,
                "ring_k": POOL,
                "ring_v": POOL,
                "ring_g": FLOAT_POOL,
                "ring_beta": FLOAT_POOL,
            },
            "o",
            lambda a: (ANY, ANY, a.num_heads * a.value_dim),
            recurrent_slots,
            delta_launch(kda.shape_of, "qkv", "f", "b"),
            "qkv",
        ),
    )
    for d in with_copies(plain)
}
