"""The plugin layers in TensorRT's own registry: names, fields, types, shapes, aliases, kernels; and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lean_runtime import missing, tensorrt_bindings

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

from quick_harness import Built  # noqa: E402

from trtllm_replayssm.compat import TensorRT  # noqa: E402
from trtllm_replayssm.errors import EngineError  # noqa: E402
from trtllm_replayssm.network.tensorrt.plugin_layer import PluginOutput  # noqa: E402
from trtllm_replayssm.network.tensorrt.quick_plugins import QuickPlugins  # noqa: E402
from trtllm_replayssm.plugins.advance import AdvanceAttributes  # noqa: E402
from trtllm_replayssm.plugins.causal_conv import CausalConvAttributes  # noqa: E402
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes  # noqa: E402
from trtllm_replayssm.plugins.kda import KdaAttributes  # noqa: E402
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes  # noqa: E402
from trtllm_replayssm.plugins.tensorrt.definitions import ANY, DEFINITIONS, Bound  # noqa: E402
from trtllm_replayssm.plugins.tensorrt.quick import from_plugin, register_plugins, to_plugin  # noqa: E402
from trtllm_replayssm.plugins.tensorrt.symbolic import Symbolic  # noqa: E402

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
Shape = tuple["int | str", ...]
#: Rows and T of the profiles of an engine for 64 requests, 4 tokens a verify step and chunks of 2048.
PREFILL, DECODE, VERIFY = ((1, 1, 1), (1, 2048, 2048)), ((1, 64, 64), (1, 1, 1)), ((1, 64, 64), (4, 4, 4))
PROFILES = {"prefill": PREFILL, "decode": DECODE, "verify": VERIFY}


@dataclass(frozen=True)
class Case:
    """A layer with the sizes of a released model: dtypes and shapes of its inputs, written out, and of its outputs.

    symbol: of the kernel by profile, where it is written out, too.
    """

    layer: str
    attributes: Any
    inputs: dict[str, tuple[torch.dtype, Shape]]
    outputs: list[tuple[torch.dtype, Shape]]
    symbol: dict[str, str]


def tokens(width: int) -> tuple[torch.dtype, Shape]:
    return BF16, ("rows", "tokens", width)


def pool(elements: int, dtype: torch.dtype = F32) -> tuple[torch.dtype, Shape]:
    return dtype, ("rows", elements)


STEP = (I32, ("rows", 8))
ROW = (I32, ("rows",))
WEIGHT = {"weight": (BF16, (6144, 4))}
RING = pool(7 * 6144, BF16)
CONV = CausalConvAttributes(6144, 4, 7)
MAMBA2 = Mamba2Attributes(64, 64, 128, 8, 16, 20)
GATED_DELTA = GatedDeltaAttributes(16, 32, 128, 128, 16, 20)
KDA = KdaAttributes(32, 128, 128, 16, 20, -5.0)
HEADS_64, HEADS_32 = (F32, (64,)), (F32, (32,))
CASES = [
    Case(
        "advance",
        AdvanceAttributes(16),
        {
            "cursors": pool(64, I32),
            "slot_ids": ROW,
            "query_lens": ROW,
            "modes": ROW,
            "token_ids": (I32, ("rows", "tokens")),
        },
        [STEP, pool(64, I32)],
        dict.fromkeys(PROFILES, "advance"),
    ),
    Case(
        "causal_conv",
        CONV,
        {"x": tokens(6144), **WEIGHT, "bias": (BF16, (6144,)), "step": STEP, "conv_ring": RING},
        [tokens(6144), RING],
        dict.fromkeys(PROFILES, "causal_conv"),
    ),
    Case(
        "causal_conv_without_bias",
        CONV,
        {"x": tokens(6144), **WEIGHT, "no_bias": WEIGHT["weight"], "step": STEP, "conv_ring": RING},
        [tokens(6144), RING],
        dict.fromkeys(PROFILES, "causal_conv"),
    ),
    Case(
        "mamba2",
        MAMBA2,
        {
            "xbc": tokens(6144),
            "dt": tokens(64),
            **dict.fromkeys(("A_log", "dt_bias", "D"), HEADS_64),
            "step": STEP,
            "state": pool(64 * 64 * 128),
            "ring_x": pool(64 * 20 * 64, BF16),
            "ring_b": pool(8 * 20 * 128, BF16),
            "ring_dt": pool(64 * 20),
        },
        [tokens(4096), pool(64 * 64 * 128), pool(64 * 20 * 64, BF16), pool(8 * 20 * 128, BF16), pool(64 * 20)],
        {"prefill": "mamba2_prefill", "decode": "mamba2_step", "verify": "mamba2_step"},
    ),
    Case(
        "gated_delta",
        GATED_DELTA,
        {
            "qkv": tokens(2 * 16 * 128 + 32 * 128),
            "a": tokens(32),
            "b": tokens(32),
            "A_log": HEADS_32,
            "dt_bias": HEADS_32,
            "step": STEP,
            "state": pool(32 * 128 * 128),
            "ring_k": pool(16 * 20 * 128, BF16),
            "ring_v": pool(32 * 20 * 128, BF16),
            "ring_g": pool(32 * 20),
            "ring_beta": pool(32 * 20),
        },
        [
            tokens(4096),
            pool(32 * 128 * 128),
            pool(16 * 20 * 128, BF16),
            pool(32 * 20 * 128, BF16),
            pool(32 * 20),
            pool(32 * 20),
        ],
        dict.fromkeys(PROFILES, "gated_delta") | {"prefill": "gated_delta_prefill"},
    ),
    Case(
        "kda",
        KDA,
        {
            "qkv": tokens(3 * 4096),
            "f": tokens(4096),
            "b": tokens(32),
            "A_log": HEADS_32,
            "dt_bias": (F32, (4096,)),
            "step": STEP,
            "state": pool(32 * 128 * 128),
            "ring_k": pool(32 * 20 * 128, BF16),
            "ring_v": pool(32 * 20 * 128, BF16),
            "ring_g": pool(32 * 20 * 128),
            "ring_beta": pool(32 * 20),
        },
        [
            tokens(4096),
            pool(32 * 128 * 128),
            pool(32 * 20 * 128, BF16),
            pool(32 * 20 * 128, BF16),
            pool(32 * 20 * 128),
            pool(32 * 20),
        ],
        dict.fromkeys(PROFILES, "kda") | {"prefill": "kda_prefill"},
    ),
]
#: Layers whose launch depends on the number of rows by more than the grid's second axis.
HEADS_BY_ROWS = ("mamba2", "gated_delta", "kda")


def copied(case: Case, read_dtype: str, heads: int, rows: int, columns: int) -> Case:
    """The layer with a read copy of its ``[heads, rows, columns]`` state."""
    codes, block = (columns, 32) if read_dtype == "fp8" else (columns // 2, 16)
    scales = heads * rows * columns // block
    pools = {"read_codes": pool(heads * rows * codes, torch.int8), "read_scales": pool(scales, torch.int8)}
    # 32 or 64 floats, of which one slot takes 256 bytes.
    pools |= {"read_head_scale": pool(64)} if read_dtype == "nvfp4" else {}
    return replace(
        case,
        layer=f"{case.layer}_{read_dtype}",
        attributes=replace(case.attributes, read_dtype=read_dtype),
        inputs=case.inputs | pools,
        outputs=[*case.outputs, *pools.values()],
        symbol={},
    )


STATES = {"mamba2": (64, 64, 128), "gated_delta": (32, 128, 128), "kda": (32, 128, 128)}
COPIED = [
    copied(case, read_dtype, *STATES[case.layer])
    for case in CASES
    if case.layer in STATES
    for read_dtype in ("fp8", "nvfp4")
]
every_layer = pytest.mark.parametrize("case", [*CASES, *COPIED], ids=[case.layer for case in (*CASES, *COPIED)])


@pytest.fixture(scope="module")
def tensorrt() -> TensorRT:
    """TensorRT's bindings with our plugins registered; registering twice must do no harm."""
    found = TensorRT.of(tensorrt_bindings(), "tensorrt")
    register_plugins(found)
    register_plugins(found)
    return found


def built(
    case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch, aliased: bool = False, **changes: Any
) -> Built:
    definition = DEFINITIONS[case.layer]
    values = to_plugin(definition, case.attributes, (9, 0), aliased) | changes
    return Built(tensorrt.module, tensorrt, definition, values, monkeypatch)


def described(plugin: Built, case: Case, **changes: tuple[torch.dtype, Shape]) -> tuple[list, list]:
    inputs = case.inputs | changes
    return plugin.describe([dtype for dtype, _ in inputs.values()], [shape for _, shape in inputs.values()])


@every_layer
def test_registry_knows_the_layer(case: Case, tensorrt: TensorRT) -> None:
    registry = tensorrt.module.get_plugin_registry()
    creator = registry.get_creator(case.layer, "1", "replayssm")
    fields = [field.name for field in creator.field_names]
    own = [name for name in vars(case.attributes) if name not in DEFINITIONS[case.layer].fixed]
    assert fields == [*own, "compute_capability", "aliased"]
    assert (case.layer, "replayssm") in {(c.name, c.plugin_namespace) for c in registry.all_creators}


@every_layer
def test_inputs_are_those_of_the_contract(case: Case) -> None:
    assert list(DEFINITIONS[case.layer].inputs) == list(case.inputs)


@every_layer
@pytest.mark.parametrize("aliased", [False, True])
def test_outputs(case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch, aliased: bool) -> None:
    plugin = built(case, tensorrt, monkeypatch, aliased)
    dtypes, shapes = described(plugin, case)
    assert dtypes == [dtype for dtype, _ in case.outputs]
    for shape, (_, expected) in zip(shapes, case.outputs, strict=True):
        assert [size(3, 5) for size in shape] == [{"rows": 3, "tokens": 5}.get(size, size) for size in expected]
    pools = [list(case.inputs).index(name) for name in DEFINITIONS[case.layer].pools]
    places = [plugin.plugin.get_aliased_input(place) for place in range(len(case.outputs))]
    assert places == [-1, *(pools if aliased else [-1] * len(pools))]


@every_layer
@pytest.mark.parametrize("profile", PROFILES)
def test_kernel_is_that_of_the_embedded_engine(
    case: Case, profile: str, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grid, block, arguments and number of parameters are the launch record's, at the profile's ends and between."""
    plugin = built(case, tensorrt, monkeypatch)
    described(plugin, case)
    (least, usual, most), (fewest, _, longest) = rows, count = PROFILES[profile]
    kernel = plugin.compile(rows, count)
    bound = {name: Bound(dtype, shape[-1]) for name, (dtype, shape) in case.inputs.items()}
    chosen = DEFINITIONS[case.layer].launch(case.attributes, bound, usual, longest)
    assert kernel.name == chosen.kernel.symbol == case.symbol.get(profile, chosen.kernel.symbol)
    assert f".entry {kernel.name}(".encode() in kernel.ptx
    assert b".target sm_90a" in kernel.ptx
    assert kernel.shared == 0
    parameters = kernel.ptx.split(f".entry {kernel.name}(".encode())[1].split(b")")[0].count(b".param")
    assert parameters == len(case.inputs) + len(kernel.integers(1, 1)) + len(case.outputs)
    assert kernel.block == (chosen.kernel.block, 1, 1)
    for r, t in ((least, longest), (usual, longest), ((least + most) // 2, (fewest + longest) // 2), (most, longest)):
        record = DEFINITIONS[case.layer].launch(case.attributes, bound, r, t)
        if case.layer.startswith(HEADS_BY_ROWS):
            # How many heads or slices a block takes is decided by the usual number of rows.
            record = DEFINITIONS[case.layer].launch(case.attributes, bound, usual, t)
            record = replace(record, grid=(record.grid[0], r, 1))
        assert record.kernel == chosen.kernel
        assert kernel.grid(r, t) == record.grid
        assert kernel.integers(r, t) == record.integers
        # T, then the step from one token, or one slot, to the next in every activation and pool, in the inputs' order.
        moved = [shape[-1] for dtype, shape in case.inputs.values() if "rows" in shape and dtype != I32]
        expected = (t, *moved) if moved else (r, t)
        assert kernel.integers(r, t)[: len(expected)] == expected


def test_few_rows_take_warps_that_work_alone(tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Mamba-2 without drafts, at a profile that is tuned for them; they serve its other rows, too."""
    case = next(case for case in CASES if case.layer == "mamba2")
    rings = {"ring_x": pool(64 * 16 * 64, BF16), "ring_b": pool(8 * 16 * 128, BF16), "ring_dt": pool(64 * 16)}
    case = replace(case, attributes=replace(MAMBA2, ring_rows=16), inputs=case.inputs | rings)
    plugin = built(case, tensorrt, monkeypatch)
    described(plugin, case)
    kernel = plugin.compile((1, 1, 64), (1, 1, 1))
    assert kernel.name == "mamba2_single"
    assert [kernel.grid(rows, 1) for rows in (1, 64)] == [(128, 1, 1), (128, 64, 1)]


@every_layer
def test_profiles_have_tactics_of_their_own(case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT keeps one kernel a tactic; a shared one would launch one profile's kernel on another's tokens."""
    plugin = built(case, tensorrt, monkeypatch)
    described(plugin, case)
    kernels = {name: plugin.compile(*profile) for name, profile in PROFILES.items()}
    assert [kernels[name].tactic for name in ("decode", "verify", "prefill")] == [1, 4, 17]
    with pytest.raises(ValueError, match="tactic 4 was asked for shapes of tactic 17"):
        plugin.compile(*PREFILL, tactic=4)


@every_layer
def test_wrong_dtype_is_refused(case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, (_, shape) in case.inputs.items():
        with pytest.raises(ValueError, match=rf"replayssm::{case.layer}: \w+ is torch\.\w+, not "):
            described(built(case, tensorrt, monkeypatch), case, **{name: (torch.int64, shape)})


@every_layer
def test_wrong_sizes_are_refused(case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each input in turn, each static axis, by one; and an axis too many."""
    for name, (dtype, shape) in case.inputs.items():
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                wrong = (*shape[:axis], size + 1, *shape[axis + 1 :])
                with pytest.raises(ValueError, match=f"axis {axis} of {name} is {size + 1}, not {size}"):
                    described(built(case, tensorrt, monkeypatch), case, **{name: (dtype, wrong)})
        with pytest.raises(ValueError, match=f"{name} has {len(shape) + 1} axes, not {len(shape)}"):
            described(built(case, tensorrt, monkeypatch), case, **{name: (dtype, (*shape, 1))})


def test_attributes_that_do_not_fit_the_inputs_are_refused(tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.layer == "mamba2")
    with pytest.raises(ValueError, match="axis 2 of xbc is 6144, not 8192"):
        described(built(case, tensorrt, monkeypatch, n_groups=16), case)


def test_unknown_attribute_is_refused(tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.layer == "mamba2")
    with pytest.raises(AssertionError, match="Unexpected attribute chunk_size"):
        built(case, tensorrt, monkeypatch, chunk_size=256)


def test_padded_slots(tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is a multiple of 256 bytes, also where its elements are not."""
    attributes = Mamba2Attributes(3, 16, 32, 1, 4, 5)
    definition = DEFINITIONS["mamba2"]
    assert definition.slot_elements(attributes, "ring_dt", F32) == 64
    assert definition.slot_elements(attributes, "ring_b", BF16) == 256


@every_layer
def test_attributes_survive_the_way_through_tensorrt(
    case: Case, tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert from_plugin(DEFINITIONS[case.layer], built(case, tensorrt, monkeypatch).plugin.attrs) == case.attributes


def test_absent_bound_survives(tensorrt: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in CASES if case.layer == "kda")
    softplus = replace(case, attributes=replace(case.attributes, lower_bound=None))
    assert from_plugin(DEFINITIONS["kda"], built(softplus, tensorrt, monkeypatch).plugin.attrs) == softplus.attributes


@every_layer
def test_network_adds_the_layer(case: Case, tensorrt: TensorRT) -> None:
    """Inputs reach the plugin in the kernel's order, whatever the order they are named in."""
    added = []

    class Network:
        num_layers = 1

        def add_plugin(self, make: Any, aot: bool) -> Any:
            assert aot
            inputs, shape_inputs, plugin = make(tensorrt.module.QuickPluginCreationRequest.STRICT_AOT)
            assert shape_inputs == []
            added.append((inputs, plugin))
            return SimpleNamespace(get_output=lambda place: place)

    tensor = tensorrt.module.ITensor
    kind, inputs = case.layer, {name: tensor.__new__(tensor) for name in reversed(case.inputs)}
    given = dict(inputs)
    if case in COPIED:
        # One name for the network, whatever the layer keeps.
        kind = kind.rpartition("_")[0]
    if kind == "causal_conv_without_bias":
        kind = "causal_conv"
        del given["no_bias"]
        inputs["no_bias"] = inputs["weight"]
    outputs = tuple(PluginOutput(str(i), (ANY,), dtype) for i, (dtype, _) in enumerate(case.outputs))
    emitter: Any = SimpleNamespace(network=Network(), named=lambda layer, *others: layer)
    plugins = QuickPlugins(tensorrt, (9, 0))
    assert plugins(emitter, kind, case.attributes, given, outputs) == tuple(range(len(outputs)))
    ((ordered, plugin),) = added
    assert [id(t) for t in ordered] == [id(inputs[name]) for name in case.inputs]
    assert from_plugin(DEFINITIONS[case.layer], plugin.attrs) == case.attributes
    assert plugin.attrs["compute_capability"] == 90


def test_old_bindings_and_new_numpy_are_refused(tensorrt: TensorRT) -> None:
    with pytest.raises(EngineError, match=r"TensorRT 10\.16\.1 does not work with NumPy 2\.4\.6") as error:
        replace(tensorrt, version=(10, 16, 1)).check_numpy("2.4.6")
    assert "numpy<2.4" in error.value.hint
    replace(tensorrt, version=(10, 16, 1)).check_numpy("2.3.5")
    replace(tensorrt, version=(11, 4, 0)).check_numpy("2.4.6")


def test_rtx_has_no_plugin_layers(tensorrt: TensorRT) -> None:
    rtx = replace(tensorrt, flavour="tensorrt_rtx", features=replace(tensorrt.features, plugins=False))
    with pytest.raises(EngineError, match="tensorrt_rtx has no plugin layers"):
        QuickPlugins(rtx, (9, 0))


def test_symbolic_sizes() -> None:
    """Decisions by value, results as expressions, and no silent constants."""
    trtp = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    later = {"rows": 100}
    rows = Symbolic(7, lambda _: later["rows"])
    for size, now, then in ((-(-rows // 32), 1, 4), (2 * rows + 1, 15, 201), (rows // 4, 1, 25)):
        assert size == now
        assert size.make(trtp) == then
    assert f"{rows}" == "7"
    assert rows * 2 < 15
    for wrong in (lambda: rows - 1, lambda: rows % 2, lambda: 100 // rows, lambda: rows / 2):
        with pytest.raises(TypeError, match="dynamic size"):
            wrong()
