"""Everything that is asked of TensorRT exists in the genuine bindings, and what 10.14 lacks is asked for behind a feature."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from lean_runtime import missing, tensorrt_bindings

import trtllm_replayssm
from trtllm_replayssm.compat import TensorRT

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ROOT = Path(trtllm_replayssm.__file__).parent
NETWORK, RUNTIME = ROOT / "network" / "tensorrt", ROOT / "runtime" / "tensorrt"
#: recording.py asks nothing of TensorRT; it answers in its place.
SOURCES = [
    ROOT / "compat.py",
    *(path for folder in (NETWORK, RUNTIME) for path in sorted(folder.glob("*.py")) if path.name != "recording.py"),
]
#: Class of the objects that go by these names in the sources that make networks.
BUILD_OBJECTS = {
    "network": "INetworkDefinition",
    "builder": "Builder",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
}
#: The same in the sources that run plans.
RUN_OBJECTS = {
    "runtime": "Runtime",
    "cuda_engine": "ICudaEngine",
    "context": "IExecutionContext",
    "refitter": "Refitter",
}
#: Names in the module itself.
MODULES = ("trt", "module")
#: Absent from 10.14's bindings (read off 10.14.1.48), by the feature that stands before their use. compat looks for
#: add_attention_v2 and CausalMaskKind itself.
AFTER_10_14 = {
    "add_kv_cache_update": "kv_cache_update",
    "KVCacheMode": "kv_cache_update",
    "key_value_lengths": "attention_lengths",
    "add_moe": "moe",
    "MoEActType": "moe",
    "add_dist_collective": "collective",
    "CollectiveOperation": "collective",
    "set_communicator": "collective",
    "get_aliased_input_tensor": "aliases",
}


def uses(path: Path) -> Iterator[tuple[str, str]]:
    """(class or module, member) of every attribute that is read from an object or module of those names."""
    objects = RUN_OBJECTS if path.parent == RUNTIME else BUILD_OBJECTS
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name in objects or name in MODULES:
                yield objects.get(name, "module"), node.attr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_members_exist(path: Path) -> None:
    trt = tensorrt_bindings()
    for owner, member in uses(path):
        target = trt if owner == "module" else getattr(trt, owner)
        # compat speaks of tensorrt_rtx as well, whose configs know more GPUs than the one at hand.
        if member not in ("num_compute_capabilities", "set_compute_capability", "ComputeCapability"):
            assert hasattr(target, member), f"{path.name}: {owner}.{member}"


def test_the_sources_are_read() -> None:
    found = {use for path in SOURCES for use in uses(path)}
    assert {
        ("INetworkDefinition", "add_matrix_multiply"),
        ("Builder", "build_serialized_network"),
        ("IOptimizationProfile", "set_shape"),
        ("IBuilderConfig", "clear_flag"),
        ("module", "Weights"),
    } <= found


@pytest.mark.parametrize("member", AFTER_10_14)
def test_later_members_stand_behind_a_feature(member: str) -> None:
    """The file that uses a member asks for its feature."""
    users = [path for path in SOURCES if path.name != "compat.py" and f".{member}" in path.read_text(encoding="utf-8")]
    assert users
    for path in users:
        assert f"features.{AFTER_10_14[member]}" in path.read_text(encoding="utf-8"), path.name


def test_features_of_11_4() -> None:
    tensorrt = TensorRT.of(tensorrt_bindings(), "tensorrt")
    assert tensorrt.version[:2] >= (11, 4)
    assert all(vars(tensorrt.features).values())
