"""CUDA graphs change no bit: whole engines with graphs against the same kernels launched one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.layers.mlp import Mlp
from trtllm_replayssm.builders.layers.moe import Moe
from trtllm_replayssm.network.base import Rope
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.request import Request
from trtllm_replayssm.runtime.sampling import SamplingParams
from trtllm_replayssm.runtime.scheduler import Scheduler
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.speculation.ngram import NgramDrafter
from trtllm_replayssm.runtime.steps import PackedSteps, kv_bucket, row_bucket

SLOTS = 6
#: Errors of the kernels in 16 bits, over those of torch's recurrences.
ROUNDING = 1.5
#: Sizes that every kernel of the embedded engine takes.
LAYERS = (
    Mamba2(num_heads=8, head_dim=64, state_size=128, n_groups=2, conv_kernel=4, norm_epsilon=1e-5),
    Moe(16, 4, 64, "relu2", "sigmoid", shared=Mlp(96, "relu2"), routed_scale=2.5),
    Attention(8, 2, 64, 0.125),
    Moe(16, 4, 64, "swiglu", "softmax", shared=Mlp(96, "swiglu"), shared_gate=True),
    GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=128, conv_kernel=4, norm_epsilon=1e-6),
    Mlp(96, "swiglu"),
    Attention(4, 1, 64, 0.125, Rope(16, 1e6), 1e-6, qk_norm_zero_centred=True, output_gate=True),
)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.write_engine(
        tmp_path_factory.mktemp("graphs") / "engine",
        synthetic.decoder(LAYERS),
        BuildOptions(max_batch_size=SLOTS, max_seq_len=600, max_num_tokens=256),
        dtype=request.param,
        replay=ReplayConfig(window=8, max_draft_len=3),
    )


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(folder, device="cuda", plugin_impl="cuda")


def history(session: Session) -> list[torch.Tensor]:
    """Everything a server does to its slots: logits and hidden states of each step, 0 where there is no valid token."""
    out: list[torch.Tensor] = []
    random = torch.Generator().manual_seed(7)

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(0, synthetic.VOCAB_SIZE, shape, generator=random)

    def step(rows: int, first: int, tokens: int, lengths: list[int], accepted: list[int]) -> None:
        active = [n > 0 for n in lengths]
        logits = session.step(ids(rows, tokens), first, [max(n, 1) for n in lengths], active=active)
        session.commit(first, accepted)
        valid = (torch.arange(tokens) < torch.tensor(lengths)[:, None])[..., None].to(logits.device)
        out.extend(torch.where(valid, result, 0) for result in (logits, session.hidden))

    for slot, length in enumerate((5, 61, 250, 1, 33)):
        session.admit(slot)
        out.append(session.prefill(slot, ids(length)))
    for i in range(20):  # past a whole window, and past a bound of the KV cache
        step(5, 0, 1, [1, 1, 1, 1, i % 2], [1, 1, 1, 1, i % 2])
    for accepted in ((1, 2, 0, 4), (4, 4, 1, 3), (2, 1, 0, 1), (3, 3, 1, 2)):
        step(4, 1, 4, [4, 2, 1, 4] if accepted[1] <= 2 else [4, 4, 1, 4], [min(a, 4) for a in accepted])
    saved = session.save(2)
    session.admit(2)
    session.restore(5, saved)  # preempted, and resumed in another slot
    step(1, 5, 1, [1], [1])
    step(6, 0, 1, [1, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 1])
    flush = session.step(ids(2, 1), 0, modes=[RowMode.FLUSH] * 2)
    session.commit(0, [1, 1])
    out.append(flush)
    return [tensor.cpu() for tensor in out]


def test_graphs_change_no_bit(engine):
    captured = captured_session(engine)
    assert captured.steps.graphs is not None
    # The last chunk of a prompt may be as short as a verify step.
    assert {shape.tokens for shape in captured.steps.graphs.captured} >= {1, 4}
    assert {shape.kv_len for shape in captured.steps.graphs.captured} >= {256, 512}
    assert torch.equal(captured.cursors.cpu(), captured.host)


@pytest.mark.parametrize("read_dtype", ["fp8", "nvfp4"])
def test_graphs_change_no_bit_of_read_copies(engine, read_dtype):
    captured = captured_session(synthetic.with_replay(engine, state_read_dtype=read_dtype))
    assert {shape.tokens for shape in captured.steps.graphs.captured} >= {1, 4}


def captured_session(engine: Engine) -> Session:
    """A session whose steps ran as graphs, after it was held against one without."""
    plain, captured = Session(engine, cuda_graphs=False), Session(engine, cuda_graphs=True)
    for a, b in zip(history(plain), history(captured), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()
    for name in plain.pools:
        assert torch.equal(plain.pools[name], captured.pools[name]), name
    assert torch.equal(plain.cursors, captured.cursors)
    return captured


def test_packed_rows_agree_with_the_reference(folder, engine):
    """Buckets, gaps and slots in any order, against torch's own recurrences row by row on the CPU.

    In 16 bits both err, by roundings that fall elsewhere; the bound is what the reference errs.
    """
    reference = Engine.load(folder, device="cpu")
    want, theirs, got = (logits(history(Session(one))) for one in (synthetic.in_float32(reference), reference, engine))
    size, rounding = float(want.norm()), float((theirs - want).norm())
    bound = 1e-4 * size if engine.config.checkpoint.dtype == "float32" else ROUNDING * rounding
    assert float((got - want).norm()) < bound < 0.05 * size


def logits(steps: list[torch.Tensor]) -> torch.Tensor:
    """Those of all steps together, in float32."""
    return torch.cat([step.float().flatten() for step in steps if step.shape[-1] == synthetic.VOCAB_SIZE])


def test_tokens_on_the_device_make_the_same_steps(engine):
    host, device = Session(engine), Session(engine)
    ids = torch.randint(0, synthetic.VOCAB_SIZE, (3, 7), generator=torch.Generator().manual_seed(1))
    active = [True, False, True]
    for i in range(7):
        for session, tokens in ((host, ids[:, i : i + 1]), (device, ids[:, i : i + 1].cuda())):
            session.logits = session.step(tokens, 1, active=active)
            session.commit(1, active)
        assert torch.equal(host.logits[::2], device.logits[::2])


def test_a_step_never_waits_for_the_device(engine):
    session = Session(engine)
    tokens = torch.ones(4, 1, dtype=torch.int32, device="cuda")
    session.step(tokens)  # captures
    session.commit(0, [1] * 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            tokens = session.step(tokens).argmax(-1)
            session.commit(0, [1] * 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_warm_up_captures_what_steps_need_and_changes_nothing(engine):
    session = Session(engine)
    session.step([[1], [2]])
    session.commit(0, [1, 1])
    before = {name: pool.clone() for name, pool in session.pools.items()}
    assert session.warm_up(300) == 4 * 2 * 2  # 1, 2, 4 and 6 rows, 1 and 4 tokens, 256 and 512 positions
    assert all(torch.equal(pool, before[name]) for name, pool in session.pools.items())
    assert torch.equal(session.cursors.cpu(), session.host)
    session.step([[1, 2, 3, 4]] * 5)
    assert len(session.steps.graphs.captured) == 16
    assert Session(engine, cuda_graphs=False).warm_up() == 0


def test_results_outlive_the_next_step(engine):
    session = Session(engine)
    first = session.step([[1], [2], [3]])
    kept = first.clone()
    session.commit(0, [1] * 3)
    session.step([[4], [5], [6]])
    assert torch.equal(first, kept)


@pytest.mark.parametrize("drafter", [None, NgramDrafter], ids=["plain", "ngram"])
def test_the_scheduler_serves_the_same_text(engine, drafter):
    texts = []
    for graphs in (False, True):
        scheduler = Scheduler(Session(engine, cuda_graphs=graphs), drafter and drafter(), time_slice=9)
        requests = []
        for i in range(11):
            prompt = [(7 * i + j) % 5 + 1 for j in range(3 + 5 * i)]
            params = SamplingParams(max_tokens=12 + i, temperature=None if i % 2 else 0.8, seed=i, end_id=-1)
            requests.append(Request(i, prompt, params, params.end_ids(()), None))
            scheduler.submit(requests[-1])
        while scheduler.busy:
            scheduler.step()
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_the_scheduler_never_stops_the_device(engine):
    """Whatever its requests ask for, it waits for nothing but the copies of tokens that were chosen a step before."""
    made = Scheduler(Session(engine))
    asks = (
        {},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_k": 20},
        {"logprobs": 2, "return_generation_logits": True},
    )
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "min_tokens": 9}
    requests = []
    for i, ask in enumerate((*asks, penalties)):
        params = SamplingParams(max_tokens=30, seed=i, **ask)
        requests.append(Request(i, [3 + i] * 5, params, frozenset([7]), None))
        made.submit(requests[-1])
    for _ in range(4):
        made.step()
    held = [len(request.tokens) for request in requests]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            made.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert any(len(request.tokens) == before + 4 for request, before in zip(requests, held))
    while made.busy:
        assert not [update for update in made.step() if update.error]


def test_memory_is_free_when_the_session_is_gone(engine):
    used = []
    for _ in range(3):
        session = Session(engine)
        session.step([[1]])
        assert isinstance(session.steps, PackedSteps)
        del session
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    # The first one's libraries keep their workspaces.
    assert used[1] == used[2] <= used[0]


def test_buckets():
    assert [row_bucket(n, 100) for n in (0, 1, 2, 3, 9, 32, 33, 64, 99)] == [1, 1, 2, 4, 16, 32, 64, 64, 100]
    assert [kv_bucket(n, 3000) for n in (1, 256, 257, 1025, 2900)] == [256, 256, 512, 2048, 3000]
