"""Stochastic rounding: Philox's published values, the neighbours, the mean, and what it is for."""

from __future__ import annotations

import pytest
import torch

from trtllm_replayssm.plugins.advance import AdvanceAttributes
from trtllm_replayssm.plugins.cursors import CURSOR_WORDS, STEP_WORDS, Cursor, Step
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.reference.advance import advance
from trtllm_replayssm.plugins.reference.mamba2 import mamba2
from trtllm_replayssm.plugins.reference.rounding import philox, random_bits, stochastic

BF16, FP16 = torch.bfloat16, torch.float16
DRAWS = 4096


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """The known answers that come with Random123, the authors' library."""
    got = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert [f"{int(word):08x}" for word in got] == words.split()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 3e-5, 1e-7, 3e4], ids=str)
def test_neighbours_and_mean(dtype, scale):
    """Always one of the two neighbours, exact numbers as they are, and no bias within four standard errors."""
    x = (torch.randn(64, generator=torch.Generator().manual_seed(0)) * scale).clamp(-6e4, 6e4)
    draws = stochastic(x.repeat(DRAWS), dtype, 3, 1000).view(DRAWS, -1).double()
    x64, digits = x.double(), 7 if dtype == BF16 else 10
    unit = (2 ** (x64.abs().log2().floor() - digits)).clamp(min=2.0**-24 if dtype == FP16 else 0)
    # No other number of the dtype is nearer than a unit.
    assert ((draws - x64).abs() < unit).all()
    assert ((draws.mean(0) - x64).abs() <= unit * (4 * 0.5 / DRAWS**0.5 + 2.0**-12)).all()
    assert (draws != draws[0]).any(0).double().mean() > 0.9, "nearly nothing is exact"
    exact = x.to(dtype)
    assert torch.equal(stochastic(exact.float(), dtype, 3, 5), exact)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_what_is_no_number_stays_so(dtype):
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    got = stochastic(odd, dtype, 1, 1)
    assert torch.equal(got.isnan(), odd.isnan())
    assert torch.equal(got[:2].float(), odd[:2]) and torch.equal(got[3:].signbit(), odd[3:].signbit())


def test_bits_depend_on_seed_position_and_element():
    base = random_bits(4096, 1, 7, torch.device("cpu"))
    assert int(base.min()) >= 0 and int(base.max()) < 1 << 16
    assert abs(float(base.double().mean()) / 2**16 - 0.5) < 0.02
    for other in (random_bits(4096, 2, 7, base.device), random_bits(4096, 1, 8, base.device)):
        assert (base == other).double().mean() < 0.01
    assert len(base.unique()) > 3800


class Decode:
    """A request of one small layer with slow decays and a 16-bit state, decoded token by token."""

    TOKENS, HEADS, DIM, SIZE = 512, 2, 8, 16

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        width = self.HEADS * self.DIM + 2 * self.SIZE
        self.xbc = 1 + 0.1 * torch.randn(1, self.TOKENS, width, generator=generator)
        self.dt = torch.zeros(1, self.TOKENS, self.HEADS)
        # A decay of 2e-4 a token, and updates of 1/150 of the state they lead to: a bfloat16 state soon stands still.
        self.weights = torch.full((self.HEADS,), -3.5), torch.full((self.HEADS,), -5.0), torch.ones(self.HEADS)

    def run(
        self, state: torch.dtype, rounded: bool = False, slot: int = 0, seed: int = 0, tokens: int = TOKENS
    ) -> torch.Tensor:
        """The state after ``tokens`` tokens."""
        attributes = Mamba2Attributes(self.HEADS, self.DIM, self.SIZE, 1, 1, 1, stochastic_rounding=rounded)
        pools = {
            name: p.allocate(slot + 1) for name, p in attributes.pools(torch.float32, state, torch.float32).items()
        }
        cursors = torch.zeros(slot + 1, CURSOR_WORDS, dtype=torch.int32)
        cursors[slot, Cursor.SEED] = seed
        one = torch.ones(1, dtype=torch.int32)
        for i in range(tokens):
            plan = advance(AdvanceAttributes(1), cursors, slot * one, one, 0 * one, 1)
            token = slice(i, i + 1)
            mamba2(attributes, self.xbc[:, token], self.dt[:, token], *self.weights, plan, pools)
            cursors[slot, Cursor.COMMITTED] += 1
        return pools["state"][slot]


def test_small_updates_are_not_lost():
    decode = Decode()
    want = decode.run(torch.float32)

    def error(got):
        return float((got.float() - want).norm() / want.norm())

    nearest, rounded = error(decode.run(BF16)), error(decode.run(BF16, rounded=True))
    assert rounded < nearest / 4, (rounded, nearest)


def test_the_slot_does_not_matter_and_the_seed_does():
    decode = Decode()
    first = decode.run(BF16, rounded=True, seed=11, tokens=40)
    assert torch.equal(first, decode.run(BF16, rounded=True, slot=3, seed=11, tokens=40))
    assert not torch.equal(first, decode.run(BF16, rounded=True, seed=12, tokens=40))


def test_a_float32_state_is_not_rounded():
    decode = Decode()
    assert torch.equal(decode.run(torch.float32, rounded=True, tokens=40), decode.run(torch.float32, tokens=40))


def test_advance_hands_on_the_seed():
    cursors = torch.zeros(2, CURSOR_WORDS, dtype=torch.int32)
    cursors[1, Cursor.SEED] = -5
    row = torch.tensor([1, -1], dtype=torch.int32)
    plan = advance(AdvanceAttributes(16), cursors, row, row.abs(), 0 * row, 1)
    assert plan.shape == (2, STEP_WORDS) and plan[:, Step.SEED].tolist() == [-5, 0]
