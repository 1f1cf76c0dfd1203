"""Compiles FlashInfer's Mamba-2 kernels on a machine without a GPU, so that a benchmark spends no minutes in nvcc.

FlashInfer compiles one library for each shape, element type and number of tokens, and looks in its own ``data/aot`` folder
first. nvcc, ninja, and a tvm_ffi and torch for the running Python are needed; the tvm_ffi that ``fetch`` brings is for the
machine that runs the benchmark. A plain library takes about half a minute of one core, one with a ring five.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import MODELS, Mamba2Model
from benchmarks.peers import loader
from benchmarks.subject import Unavailable
from trtllm_replayssm.errors import UserError

ARCHITECTURE = "9.0a"
WINDOW = 16


def prebuild(folder: Path, tokens: list[int], states: list[str]) -> Iterator[str]:
    """Build what the first Mamba-2 model needs at these token counts; yields a line for each library.

    Raises UserError when FlashInfer, the compiler or the linker's libraries are missing.
    """
    if missing := [tool for tool in ("nvcc", "ninja", "gcc") if shutil.which(tool) is None]:
        raise UserError(f"{missing[0]} is needed to compile FlashInfer's kernels")
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}", "python -m benchmarks fetch makes it")
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = ARCHITECTURE
    os.environ["FLASHINFER_DISABLE_JIT"] = ""
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = temporary
        os.environ["LIBRARY_PATH"] = f"{stand_ins(Path(temporary))}:{os.environ.get('LIBRARY_PATH', '')}"
        loader.use_folder(folder)
        for name, count in product(states, tokens):
            for spec in found(getattr(torch, name), count):
                try:
                    spec.build(verbose=False)
                except RuntimeError as error:
                    raise UserError(f"{spec.name} does not compile", telling_line(str(error))) from None
                target = folder / "flashinfer/data/aot" / spec.name / f"{spec.name}.so"
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_suffix(".partial")
                shutil.copy(spec.get_library_path(), partial)
                partial.replace(target)
                yield f"{target.name}: {target.stat().st_size / 2**20:.1f} MiB"


def telling_line(output: str) -> str:
    """The first line of a compiler or linker that says what is wrong, or the last of all: ninja's own says nothing."""
    lines = output.strip().splitlines()
    return next((line for line in lines if re.search(r"\berror:|cannot find", line)), lines[-1])


def stand_ins(folder: Path) -> Path:
    """A folder with empty CUDA libraries, for the linker; the machine that runs the benchmark has the real ones."""
    path = folder / "stand_in"
    path.mkdir()
    release = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)", release)
    for library, version in (("libcuda", "1"), ("libcudart", found[1] if found else "13")):
        named = [f"-Wl,-soname,{library}.so.{version}", "-o", str(path / f"{library}.so")]
        subprocess.run(["gcc", "-shared", "-xc", os.devnull, *named], check=True)
    return path


def found(state: torch.dtype, tokens: int) -> list[Any]:
    """``specifications``, if the running Python can import FlashInfer; UserError if not."""
    try:
        return list(specifications(state, tokens))
    except Unavailable as reason:
        raise UserError(str(reason), "pip install -e '.[peers]' brings what FlashInfer imports") from None


def specifications(state: torch.dtype, tokens: int) -> Iterator[Any]:
    """Build descriptions with the element types of ``peers/mamba2.py``: everything bfloat16 but A, indices int32."""
    s = next(iter(MODELS["mamba2"].values()))
    assert isinstance(s, Mamba2Model)
    plain = loader.whole("flashinfer.jit.mamba").gen_selective_state_update_sm90_module
    ring = loader.whole("flashinfer.jit.mamba.checkpointing_ssu").gen_checkpointing_ssu_module
    word, dims, index = torch.bfloat16, (s.head_dim, s.state_size, tokens), torch.int32
    yield plain(state, word, word, torch.float32, index, None, *dims, index, torch.int64, 0)
    heads = (s.heads // s.groups, s.groups)
    yield ring(state, word, word, word, torch.float32, index, None, *dims, WINDOW, *heads)
