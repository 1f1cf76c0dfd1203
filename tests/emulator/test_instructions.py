"""Products, rearrangements and conversions of the emulator against their definitions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from emulator.launcher import Emulation, can_emulate, load_from, run
from trtllm_replayssm.plugins.compiler import sources
from trtllm_replayssm.plugins.launch import Kernel, Launch

pytestmark = pytest.mark.skipif(not can_emulate(), reason="needs a C++ compiler on Linux")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def run_warps(symbol: str, inputs: list[Tensor], outputs: list[Tensor], integers=(), defines=(), threads=32) -> None:
    texts = {"products.cu": Path(__file__).with_name("products.cu").read_bytes()}
    for name in ("types.cuh", "ptx/mma.cuh"):
        sources(name, texts)
    kernel = Kernel("products.cu", symbol, threads, (("KIND", 0), *defines))
    addresses = [[x.data_ptr() for x in tensors] for tensors in (inputs, outputs)]
    run(load_from(kernel, "sm_90a", texts), Launch(kernel, (1, 1, 1), integers), *addresses, Emulation(seed=2))


# ---- matrices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), [(0, torch.bfloat16), (1, torch.float16), (2, torch.float32)])
def test_products(kind: int, dtype: torch.dtype) -> None:
    """Sums are cut off, not rounded: never beyond the exact one, and less than a unit in the last place away from it."""
    generator = torch.Generator().manual_seed(kind)
    inner = 8 if dtype == torch.float32 else 16
    a, b = torch.randn(16, inner, generator=generator).to(dtype), torch.randn(8, inner, generator=generator).to(dtype)
    c, d = torch.randn(16, 8, generator=generator), torch.empty(16, 8)
    run_warps("multiply", [a, b, c], [d], defines=(("KIND", kind),))
    if kind == 2:
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b))
    exact = c.double() + a.double() @ b.double().T
    assert (d.double().abs() <= exact.abs()).all()
    assert ((d.double() - exact).abs() < exact.abs() * 2**-23).all()


def test_rearrangements() -> None:
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    plain, transposed, moved = (torch.zeros_like(matrices) for _ in range(3))
    run_warps("rearrange", [matrices], [plain, transposed, moved])
    assert torch.equal(plain, matrices)
    assert torch.equal(transposed, matrices.mT)
    assert torch.equal(moved, matrices.mT)


# ---- conversions -----------------------------------------------------------------------------------------------------


def e4m3_values() -> Tensor:
    """Of codes 0 to 126; 127 is no number."""
    code = torch.arange(127)
    exponent, fraction = code // 8, (code % 8).double() / 8
    return torch.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7).double())


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Codes of the values nearest to ``x [n]``, finite; of two, the even code."""
    size = x.double().abs()
    above = torch.searchsorted(values, size).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    to_above, to_below = (values[above] - size).abs(), (size - values[below]).abs()
    tie = torch.where(above % 2 == 0, above, below)
    return torch.where(to_above < to_below, above, torch.where(to_below < to_above, below, tie))


def test_widening_of_every_code() -> None:
    f16, e4m3, e2m1 = torch.empty(65536), torch.empty(256), torch.empty(8)
    run_warps("widen", [], [f16, e4m3, e2m1], threads=64)
    want = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    assert torch.equal(f16.nan_to_num(7.5), want.nan_to_num(7.5))
    assert torch.equal(e4m3[:127].double(), e4m3_values()) and torch.equal(e4m3[128:255], -e4m3[:127])
    assert e4m3[[127, 255]].isnan().all()
    assert torch.equal(e2m1.double(), E2M1.flip(0))


def test_narrowing() -> None:
    """Every value of every format, the middles between neighbours, what lies beside them, random bits, and no numbers."""
    halves = torch.arange(32768, dtype=torch.int32).to(torch.int16).view(torch.float16)[:31744].double()
    wide = (
        torch.randint(-(2**31), 2**31, (1 << 16,), generator=torch.Generator().manual_seed(0)).int().view(torch.float32)
    )
    tops = (wide.view(torch.int32) & ~0xFFFF).view(torch.float32)
    bfloats = tops[tops.isfinite()].double().abs().sort()[0]
    points = []
    for values in (halves, bfloats, e4m3_values(), E2M1):
        middles = ((values[1:] + values[:-1]) / 2).float()
        points += [values.float(), middles, *(torch.nextafter(middles, torch.tensor(end)) for end in (0.0, torch.inf))]
    beyond = torch.tensor([65519.0, 65520.0, 464.0, 480.0, 5.0, 7.0, 1e30, 3.3e38, 3.4e38, torch.inf])
    x = torch.cat([*points, beyond])
    x = torch.cat([x, -x, wide[wide.isfinite()], torch.tensor([torch.nan])])
    f16, bf16 = torch.empty(len(x), dtype=torch.float16), torch.empty(len(x), dtype=torch.bfloat16)
    e4m3, e2m1 = (torch.empty(len(x), dtype=torch.uint8) for _ in range(2))
    run_warps("narrow", [x], [f16, bf16, e4m3, e2m1], (len(x),), threads=64)
    assert torch.equal(f16[:-1].view(torch.int16), x[:-1].half().view(torch.int16))
    assert torch.equal(bf16[:-1].view(torch.int16), x[:-1].bfloat16().view(torch.int16))
    sign = (x[:-1].view(torch.int32) < 0).long()
    assert torch.equal(e4m3[:-1].long(), nearest(x[:-1].clamp(-448, 448), e4m3_values()) + 128 * sign)
    assert torch.equal(e2m1[:-1].long(), nearest(x[:-1].clamp(-6, 6), E2M1) + 8 * sign)
    # What is no number, by PTX: E2M1 has none, and takes the largest.
    assert f16[-1].isnan() and bf16[-1].isnan() and e4m3[-1] == 127 and e2m1[-1] == 7
