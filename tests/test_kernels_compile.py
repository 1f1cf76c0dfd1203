"""The CUDA kernels compile for every released architecture, without spilling. Needs no GPU."""

from __future__ import annotations

import pytest
import torch

from trtllm_replayssm.cli.main import main
from trtllm_replayssm.errors import EngineError
from trtllm_replayssm.plugins.compiler import ARCHITECTURES, cache_folder, compile_kernel, write_atomically
from trtllm_replayssm.plugins.device import delta_rule, gated_delta, kda, mamba2
from trtllm_replayssm.plugins.device.mamba2_shape import shared_bytes
from trtllm_replayssm.plugins.gated_delta import GatedDeltaAttributes
from trtllm_replayssm.plugins.kda import KdaAttributes
from trtllm_replayssm.plugins.launch import Kernel
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.read_copy import copy_names
from trtllm_replayssm.plugins.report import released_kernels, report
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS, ReadDtype

pytest.importorskip("cuda.bindings.nvrtc")


#: The architecture that all variants are compiled for; for the others two of each kernel are.
NEWEST = ARCHITECTURES[-1]


def representatives() -> list[Kernel]:
    """The first and the last variant of each kernel."""
    by_symbol: dict[str, list[Kernel]] = {}
    for kernel in released_kernels():
        by_symbol.setdefault(kernel.symbol, []).append(kernel)
    return [kernel for kernels in by_symbol.values() for kernel in dict.fromkeys((kernels[0], kernels[-1]))]


def compiled_variants() -> list[tuple[Kernel, str]]:
    others = [(kernel, arch) for arch in ARCHITECTURES if arch != NEWEST for kernel in representatives()]
    return [*others, *((kernel, NEWEST) for kernel in released_kernels())]


@pytest.mark.parametrize(
    ("kernel", "arch"), compiled_variants(), ids=lambda value: value if isinstance(value, str) else value.symbol
)
def test_compiles_without_spills(kernel, arch):
    compiled = report(kernel, arch)
    assert not compiled.fault
    assert compiled.blocks >= 1 and 0 < compiled.occupancy <= 1
    assert f".target {arch}".encode() in compiled.binary.ptx
    assert f".entry {kernel.symbol}(".encode() in compiled.binary.ptx
    assert compiled.binary.cubin.startswith(b"\x7fELF")


def small_kernel(layer: str, dims: tuple[int, int], tokens: int, read_dtype: ReadDtype) -> Kernel:
    """What a layer of small heads launches, of a model made to try something, say."""
    (key_dim, value_dim), rows = dims, 16 + (tokens if 1 < tokens <= MAX_VERIFY_TOKENS else 0)
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16
    copies = len(copy_names(read_dtype))
    if layer == "mamba2":
        a = Mamba2Attributes(4, value_dim, key_dim, 1, 16, rows, read_dtype=read_dtype)
        return mamba2.launch_record(a, *dtypes, 3, tokens, (8,) * (6 + copies)).kernel
    shape = (
        gated_delta.shape_of(GatedDeltaAttributes(2, 4, key_dim, value_dim, 16, rows, read_dtype=read_dtype))
        if layer == "gated_delta"
        else kda.shape_of(KdaAttributes(4, key_dim, value_dim, 16, rows, read_dtype=read_dtype))
    )
    return delta_rule.launch_record(shape, *dtypes, 3, tokens, (8,) * (8 + copies)).kernel


@pytest.mark.parametrize(
    ("dims", "read_dtype"), [((16, 16), "same"), ((24, 40), "same"), ((16, 24), "nvfp4"), ((32, 16), "fp8")], ids=str
)
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 40])
@pytest.mark.parametrize("layer", ["mamba2", "gated_delta", "kda"])
def test_small_heads_compile(layer, tokens, dims, read_dtype):
    assert not report(small_kernel(layer, dims, tokens, read_dtype), "sm_90a").fault


@pytest.mark.parametrize(
    ("value_dim", "window", "read_dtype"), [(256, 16, "nvfp4"), (256, 16, "fp8"), (256, 24, "same"), (192, 30, "same")]
)
def test_inputs_that_leave_shared_memory_no_tile_compile(value_dim, window, read_dtype):
    """Of long verify steps: the product with the state then takes it from memory."""
    shape = gated_delta.shape_of(
        GatedDeltaAttributes(16, 32, 128, value_dim, window, window + 16, read_dtype=read_dtype)
    )
    strides = (8,) * (8 + len(copy_names(read_dtype)))
    kernel = delta_rule.launch_record(shape, torch.bfloat16, torch.float32, torch.bfloat16, 16, 16, strides).kernel
    assert dict(kernel.defines)["SPLIT"] == 1
    assert not report(kernel, "sm_90a").fault


@pytest.mark.parametrize("read_dtype", ["same", "fp8", "nvfp4"])
@pytest.mark.parametrize(("tokens", "window"), [(16, 24), (8, 40), (1, 16)])
def test_largest_heads_fit_the_shared_memory_that_is_computed(tokens, window, read_dtype):
    """Of Falcon-H1-34B; the longest verify steps that a block has room for among them."""
    kernel = largest_kernel(tokens, window, read_dtype)
    sizes = dict(kernel.defines)
    a = Mamba2Attributes(32, sizes["HEAD_DIM"], sizes["STATE_SIZE"], 2, 16, 16)
    block, head = shared_bytes(a, sizes["TOKENS"], sizes["ENTRIES"])
    declared = report(kernel, "sm_90a").binary.shared_bytes
    assert declared <= block + sizes["HEADS_A_BLOCK"] * head < declared + 512


@pytest.mark.parametrize("read_dtype", ["same", "fp8", "nvfp4"])
def test_steps_that_no_block_has_room_for_take_the_plain_recurrence(read_dtype):
    assert largest_kernel(16, 32, read_dtype).symbol == "mamba2_recurrent"
    assert largest_kernel(8, 32, read_dtype).symbol != "mamba2_recurrent"


def largest_kernel(tokens: int, window: int, read_dtype: ReadDtype) -> Kernel:
    """What a layer of heads of 128 with states of 256 launches."""
    a = Mamba2Attributes(32, 128, 256, 2, window, window + (tokens if tokens > 1 else 0), read_dtype=read_dtype)
    strides = (8,) * (6 + len(copy_names(read_dtype)))
    return mamba2.launch_record(a, torch.bfloat16, torch.float32, torch.bfloat16, 8, tokens, strides).kernel


def test_a_cache_file_that_cannot_be_written_leaves_nothing(tmp_path):
    target = tmp_path / "kernel.cubin"
    target.mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(target, b"code")
    assert list(tmp_path.iterdir()) == [target]


def test_a_cache_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kernel = next(k for k in released_kernels() if k.symbol == "advance")
    with pytest.raises(EngineError, match=r"cannot be kept in .*: Not a directory"):
        compile_kernel(kernel, "sm_90a")


def test_binaries_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = next(k for k in released_kernels() if k.symbol == "advance")
    first = compile_kernel(kernel, "sm_90a")
    files = {path: path.read_bytes() for path in cache_folder().iterdir()}
    assert len(files) == 3
    monkeypatch.setattr("trtllm_replayssm.plugins.compiler.run_nvrtc", None)
    assert compile_kernel(kernel, "sm_90a") == first
    assert {path: path.read_bytes() for path in cache_folder().iterdir()} == files


def test_a_source_that_does_not_compile_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"advance\.cu does not compile(.|\n)*WINDOW"):
        compile_kernel(Kernel("advance.cu", "advance", 128, (("TOKENS", 1), ("CURSOR_WORDS", 64))), "sm_90a")
    assert not cache_folder().exists()


def test_command_prints_a_table(capsys):
    assert main(["kernels", "--arch", "sm_103a", "--only", "advance"]) == 0
    assert "advance" in capsys.readouterr().out


def test_command_refuses_what_it_does_not_know(capsys):
    assert main(["kernels", "--only", "nothing"]) == 1
    assert "no kernel's name" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["foo", "sm_", "sm_75", "sm_90f", "sm_999", "compute_90a"])
def test_architectures_that_cannot_work_are_refused_before_compiling(arch, capsys):
    assert main(["kernels", "--arch", arch]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: the CUDA kernels cannot be compiled for the architecture {arch!r}"
    assert "sm_90a, sm_100a, sm_103a" in hint


@pytest.mark.parametrize("jobs", ["0", "-3"])
def test_jobs_must_be_positive(jobs, capsys):
    assert main(["kernels", "--jobs", jobs]) == 1
    assert f"--jobs is {jobs}; it must be 1 or more" in capsys.readouterr().err
