"""Read copies: their bits from the definition, outputs from them, and checkpoints that do not know of them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from replay_harness import Inputs, Row, Simulator, Spec, assert_close, garbage, joined, part

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.plugins.mamba2 import Mamba2Attributes
from trtllm_replayssm.plugins.read_copy import copy_names, copy_pools
from trtllm_replayssm.plugins.reference.read_copy import dequantise, quantise, read_copy
from trtllm_replayssm.replay import MAX_VERIFY_TOKENS, ReplayConfig

FORMATS = ("fp8", "nvfp4")
SPECS = {
    "mamba2": Spec("mamba2", (2, 4), (64, 6)),
    "gated_delta": Spec("gated_delta", (2, 4), (64, 6)),
    "kda": Spec("kda", (3, 3), (64, 6)),
}
REPLAY = ReplayConfig(window=8, max_draft_len=3)

all_kinds = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
both_formats = pytest.mark.parametrize("read_dtype", FORMATS)


# ---- formats ---------------------------------------------------------------------------------------------------------

#: Magnitudes by code, from the definition of the formats: sign, exponent and mantissa bits; E4M3's code 127 is NaN.
E4M3 = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:127]
E2M1 = [(m / 2 if e == 0 else 1 + m / 2) * 2.0 ** (max(e, 1) - 1) for e in range(4) for m in range(2)]


def nearest(x: float, magnitudes: list[float]) -> int:
    """Code of the nearest magnitude, the even one of two; the sign in the bit above."""
    distances = [abs(abs(x) - magnitude) for magnitude in magnitudes]
    code = min(range(len(magnitudes)), key=lambda code: (distances[code], code % 2))
    return code + (len(magnitudes) + len(magnitudes) % 2) * (math.copysign(1, x) < 0)


def defined_fp8(state: np.ndarray) -> tuple[list[int], list[int], np.ndarray]:
    """Codes, scales and values of a head ``[R, C]`` in exact arithmetic."""
    codes, scales, values = [], [], []
    for block in state.astype(float).reshape(-1, 32):
        exponent = -126
        while max(abs(block)) > 448 * 2.0**exponent:
            exponent += 1
        scales.append(127 + exponent)
        codes += (own := [nearest(x * 2.0**-exponent, E4M3) for x in block])
        values += [(-1) ** (code >> 7) * E4M3[code & 127] * 2.0**exponent for code in own]
    return codes, scales, np.array(values, np.float32).reshape(state.shape)


def defined_nvfp4(state: np.ndarray) -> tuple[list[int], list[int], np.float32, np.ndarray]:
    """Codes, scales, head scale and values of a head ``[R, C]``, each operation in float32."""
    one, six = np.float32(1), np.float32(6)
    head = np.abs(state).max() / np.float32(2688)
    codes, scales, values = [], [], []
    for block in state.reshape(-1, 16):
        wanted = min(np.abs(block).max() / six / head, np.float32(448)) if head else 0.0
        scales.append(nearest(float(wanted), E4M3))
        scale = np.float32(E4M3[scales[-1]])
        step = scale * head
        codes += (own := [nearest(float(x * (one / step)), E2M1) if step else 0 for x in block])
        values += [(-1) ** (code >> 3) * np.float32(E2M1[code & 7]) * scale * head for code in own]
    packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2])]
    return packed, scales, head, np.array(values, np.float32).reshape(state.shape)


def heads(seed: int) -> np.ndarray:
    """Heads ``[n, 3, 64]`` of all sizes, with blocks of zeros, values that vanish beside others, ties and signed zeros."""
    random_numbers = np.random.default_rng(seed)
    state = random_numbers.standard_normal((10, 3, 64)).astype(np.float32)
    state *= np.float32(10.0) ** np.arange(-36, 39, 8, dtype=np.float32)[:, None, None]
    state[1] *= np.float32(10.0) ** random_numbers.integers(-6, 6, (3, 64)).astype(np.float32)
    state[2, 1] = 0
    state[3] = 0
    state[4, 0, :40] = -0.0
    # Halfway between neighbours of E4M3 and of E2M1, with scales of 1.
    middles = [(low + high) / 2 for low, high in zip(E4M3[:-1:4], E4M3[1::4])]
    state[5, 0] = [448, 2688, *(-1 * middle if i % 2 else middle for i, middle in enumerate(middles)), *[0.0] * 31][:64]
    state[6] = np.tile(
        [6 * 448, 0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 6, -0.25, 0.75, 448 * 3.5, 448, 0, 0, 0], (3, 4)
    )
    state[6, 1] /= 448
    return np.concatenate((state, np.full((1, 3, 64), 1e-42, np.float32)))


@pytest.mark.parametrize("seed", range(3))
def test_fp8_is_what_its_definition_says(seed: int) -> None:
    state = heads(seed)
    copy = quantise(torch.from_numpy(state)[None], "fp8")
    values = dequantise(copy)[0]
    for head in range(len(state)):
        codes, scales, expected = defined_fp8(state[head])
        assert copy["read_scales"][0, head].view(torch.uint8).flatten().tolist() == scales
        assert copy["read_codes"][0, head].view(torch.uint8).flatten().tolist() == codes
        assert torch.equal(values[head], torch.from_numpy(expected))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_nvfp4_is_what_its_definition_says(seed: int) -> None:
    state = heads(seed)
    copy = quantise(torch.from_numpy(state)[None], "nvfp4")
    values = dequantise(copy)[0]
    for head in range(len(state)):
        codes, scales, scale, expected = defined_nvfp4(state[head])
        assert copy["read_head_scale"][0, head] == torch.tensor(scale)
        assert copy["read_scales"][0, head].view(torch.uint8).flatten().tolist() == scales
        assert copy["read_codes"][0, head].view(torch.uint8).flatten().tolist() == codes
        assert torch.equal(values[head], torch.from_numpy(expected))


@both_formats
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_narrow_states_are_quantised_as_they_are_stored(read_dtype: str, dtype: torch.dtype) -> None:
    state = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    copy, wide = quantise(state, read_dtype), quantise(state.float(), read_dtype)
    assert all(torch.equal(copy[name], wide[name]) for name in copy_names(read_dtype))


@both_formats
def test_what_is_not_finite_does_not_become_a_number(read_dtype: str) -> None:
    state = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(0))
    state[0, 0, 1, 3], state[0, 0, 2, 40] = math.inf, math.nan
    values = dequantise(quantise(state, read_dtype))
    assert not values[~state.isfinite()].isfinite().any()
    assert values[0, 1].isfinite().all()


@pytest.mark.parametrize(("read_dtype", "per_element"), [("fp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)])
def test_pools_take_the_bytes_of_their_format(read_dtype: str, per_element: float) -> None:
    pools = copy_pools(read_dtype, 64, 64, 128)
    sizes = {name: math.prod(pool.shape) * pool.dtype.itemsize for name, pool in pools.items()}
    assert tuple(pools) == copy_names(read_dtype)
    assert sizes.pop("read_head_scale", 64 * 4) == 64 * 4
    assert sum(sizes.values()) == 64 * 64 * 128 * per_element
    assert all(pool.kind == "copy" for pool in pools.values())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="fp8 needs states whose width is a multiple of 32; it is 48"):
        Mamba2Attributes(4, 16, 48, 2, 16, 16, read_dtype="fp8").pools(*[torch.float32] * 3)
    with pytest.raises(UserError, match="nvfp4 needs states whose width is a multiple of 16; it is 40"):
        copy_pools("nvfp4", 4, 16, 40)
    with pytest.raises(UserError, match="replay_fold derived does not go with state_read_dtype fp8"):
        ReplayConfig(fold="derived", state_read_dtype="fp8")
    with pytest.raises(UserError, match="state_read_dtype 'int8' is not known"):
        ReplayConfig(state_read_dtype="int8")  # type: ignore[arg-type]


# ---- steps -----------------------------------------------------------------------------------------------------------


def simulator(spec: Spec, read_dtype: str, activation: torch.dtype = torch.float64, **changes: object) -> Simulator:
    return Simulator(spec, replace(REPLAY, state_read_dtype=read_dtype, **changes), activation=activation)


def copied(sim: Simulator, slot: int) -> torch.Tensor | None:
    """What the slot's copy says; None where it says nothing yet."""
    return read_copy(sim.pools, torch.tensor([slot]))[0] if sim.folded(slot) else None


@all_kinds
@both_formats
def test_outputs_come_from_the_copy_before_the_step(spec: Spec, read_dtype: str) -> None:
    """Verify steps that append, flush, absorb and reject: the oracle goes on from the copy's values."""
    sim, text, choose = simulator(spec, read_dtype), spec.inputs(120), random.Random(0)
    folds = dict.fromkeys(RowMode, 0)
    while (done := sim.committed(0)) < 100:
        tokens, mode = choose.randint(1, 4), choose.choice((0, 0, 0, 1, 2))
        kept = tokens if mode == RowMode.ABSORB or tokens == 1 else choose.randint(1, tokens)
        drafts = garbage(spec, tokens - kept, choose.choice((math.nan, None)), seed=done)
        since, start = sim.folded(0), copied(sim, 0)
        (y,) = sim.step([Row(0, joined(part(text, done, done + kept), drafts), RowMode(mode))])
        expected, _ = spec.expected(sim.weights, part(text, 0, done + kept), since, start)
        assert_close(y[:kept], expected[done - since :], 1e-9)
        folds[RowMode(mode)] += sim.folded(0) > since
        sim.commit(0, kept)
        exact = spec.expected(sim.weights, part(text, 0, done + kept))[1][sim.folded(0)]
        if sim.folded(0):
            assert_close(sim.pools["state"][0], exact, 1e-9)
            assert_close(copied(sim, 0), dequantise(quantise(exact[None], read_dtype))[0], 1e-5)
    assert all(folds.values()), folds


@all_kinds
@both_formats
def test_long_steps_answer_from_the_checkpoint_and_renew_the_copy(spec: Spec, read_dtype: str) -> None:
    plain, sim = (simulator(spec, choice, torch.float32) for choice in ("same", read_dtype))
    text = spec.inputs(60)
    for start, stop in ((0, 20), (20, 40), (40, 40 + MAX_VERIFY_TOKENS + 1)):
        ours, theirs = (s.decode(0, part(text, start, stop), RowMode.ABSORB) for s in (sim, plain))
        assert torch.equal(ours, theirs)
        assert torch.equal(copied(sim, 0), dequantise(quantise(sim.pools["state"][:1], read_dtype))[0])
    # As many tokens as a verify step has at most come from the copy.
    tail = part(text, 40, 40 + MAX_VERIFY_TOKENS)
    ours, theirs = (s.decode(0, tail, RowMode.ABSORB) for s in (sim, plain))
    assert not torch.equal(ours, theirs)
    assert torch.equal(sim.pools["state"][0], plain.pools["state"][0])


@all_kinds
@both_formats
def test_outputs_do_not_depend_on_whether_their_step_folds(spec: Spec, read_dtype: str) -> None:
    text = spec.inputs(30)
    answers = []
    for mode in RowMode:
        sim = simulator(spec, read_dtype, torch.float32)
        sim.decode(0, part(text, 0, 20), RowMode.ABSORB)
        sim.decode(0, part(text, 20, 23))
        answers.append(sim.decode(0, part(text, 23, 26), mode))
        assert sim.folded(0) == (20, 23, 26)[mode]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


@all_kinds
@both_formats
def test_copies_of_other_slots_stay_as_they_are(spec: Spec, read_dtype: str) -> None:
    sim, text = simulator(spec, read_dtype), spec.inputs(30)
    before = {name: sim.pools[name].clone() for name in copy_names(read_dtype)}
    for start in range(0, 30, 3):
        sim.step([Row(2, part(text, start, start + 3)), Row(-1, garbage(spec, 3, math.nan, 0), RowMode.ABSORB)])
        sim.commit(2, 3)
    assert sim.folded(2) > 0
    for name, pool in before.items():
        assert torch.equal(sim.pools[name][:2].view(torch.uint8), pool[:2].view(torch.uint8))
        assert not torch.equal(sim.pools[name][2], pool[2])


@both_formats
def test_copies_of_randomly_rounded_states_are_of_what_is_stored(read_dtype: str) -> None:
    spec = replace(SPECS["mamba2"], options={"stochastic_rounding": True})
    sim, text = simulator(spec, read_dtype, torch.float32, state_dtype="bfloat16"), spec.inputs(40)
    for start in range(0, 40, 4):
        sim.decode(0, part(text, start, start + 4))
    stored = quantise(sim.pools["state"][:1], read_dtype)
    assert sim.folded(0) > 0
    assert all(torch.equal(sim.pools[name][:1], stored[name]) for name in copy_names(read_dtype))


# ---- 8,192 tokens ----------------------------------------------------------------------------------------------------

TOKENS, CHUNK, LONGEST = 8192, 64, 8
LONG_REPLAY = ReplayConfig(window=16, max_draft_len=LONGEST - 1)
#: Decays of about 1e-3 a token, with which an error would stay for long.
LONG_SPECS = {kind: replace(spec, heads=(1, 1), dims=(64, 32), decay_bias=-7.0) for kind, spec in SPECS.items()}


@dataclass
class Request:
    """A request that wanders: drafts are rejected, it is preempted, resumed elsewhere, and continued from a prefix."""

    sim: Simulator
    text: Inputs
    slot: int = 0
    answers: list[torch.Tensor] = field(default_factory=list)

    def run(self, seed: int) -> None:
        choose, spec = random.Random(seed), self.sim.spec
        for start in range(0, 4 * CHUNK, CHUNK):
            self.answers.append(self.sim.decode(self.slot, part(self.text, start, start + CHUNK), RowMode.ABSORB))
        while (done := self.sim.committed(self.slot)) < TOKENS:
            tokens = min(choose.choice((1, LONGEST, LONGEST)), TOKENS - done)
            kept = tokens if tokens == 1 else choose.randint(tokens // 2, tokens)
            drafts = garbage(spec, tokens - kept, choose.choice((math.nan, None)), seed=done)
            mode = choose.choice((RowMode.DECODE,) * 15 + (RowMode.FLUSH,))
            (y,) = self.sim.step([Row(self.slot, joined(part(self.text, done, done + kept), drafts), mode)])
            self.answers.append(y[:kept])
            self.sim.commit(self.slot, kept)
            if choose.random() < 0.02:
                choose.choice((self.resume, self.materialise))(1 - self.slot)

    def resume(self, slot: int) -> None:
        self.sim.copy_slot(self.slot, slot)
        self.leave(slot)

    def materialise(self, slot: int) -> None:
        done = self.sim.committed(self.slot)
        self.sim.materialise(self.slot, slot, done)
        self.sim.pools["conv_ring"][slot] = self.sim.pools["conv_ring"][self.slot]
        self.sim.cursors[slot, :2] = done
        self.leave(slot)

    def leave(self, slot: int) -> None:
        """Go on in ``slot``; whoever comes next leaves nothing usable in the old one."""
        for name, pool in self.sim.pools.items():
            pool[self.slot] = 0x7F if pool.dtype == torch.int8 else math.nan
            assert name != "state" or pool[slot].isfinite().all()
        self.slot = slot


@cache
def long_run(kind: str, read_dtype: str) -> Request:
    spec = LONG_SPECS[kind]
    weights = spec.weights() | {"D": torch.zeros(spec.heads[1])}
    replay = replace(LONG_REPLAY, state_read_dtype=read_dtype)
    sim = Simulator(spec, replay, slots=2, activation=torch.float32, weights=weights)
    request = Request(sim, spec.inputs(TOKENS))
    request.run(seed=1)
    return request


@pytest.mark.parametrize("kind", SPECS)
@both_formats
def test_checkpoints_are_those_without_a_copy_bit_for_bit(kind: str, read_dtype: str) -> None:
    plain, copied = long_run(kind, "same"), long_run(kind, read_dtype)
    assert copied.sim.committed(copied.slot) == TOKENS
    assert torch.equal(plain.sim.cursors, copied.sim.cursors)
    for name, pool in plain.sim.pools.items():
        assert torch.equal(pool[plain.slot].nan_to_num(7.0), copied.sim.pools[name][copied.slot].nan_to_num(7.0)), name
    stored = quantise(copied.sim.pools["state"][[copied.slot]], read_dtype)
    assert all(torch.equal(copied.sim.pools[name][[copied.slot]], stored[name]) for name in stored)


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize(("read_dtype", "least", "most"), [("fp8", 1.1e-2, 2.3e-2), ("nvfp4", 4e-2, 8.5e-2)])
def test_errors_are_those_of_one_rounding_and_do_not_grow(
    kind: str, read_dtype: str, least: float, most: float
) -> None:
    """In every eighth of the decoded text alike. Mamba-2's are the smaller ones: what SiLU leaves has one sign mostly, so
    that outputs are sums in which errors cancel."""
    want, got = (torch.cat(long_run(kind, choice).answers)[4 * CHUNK :] for choice in ("same", read_dtype))
    errors = [float((g - w).norm() / w.norm()) for w, g in zip(want.chunk(8), got.chunk(8), strict=True)]
    assert least < min(errors), errors
    assert max(errors) < most, errors
    first, last = sum(errors[:4]), sum(errors[4:])
    assert last < 1.05 * first, errors
