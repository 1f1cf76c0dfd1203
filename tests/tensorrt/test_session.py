"""Sessions of plans against sessions of embedded engines of the same checkpoint.

TensorRT is a stand-in that computes the genuine network definitions at the addresses that the session binds (stand_in.py).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
import torch

pytest.importorskip("tensorrt_rtx_bindings", reason="pip install tensorrt-rtx-cu13-libs tensorrt-rtx-cu13-bindings")

from engine_pair import TOLERANCE, Pair, Sessions, tokens
from lean_runtime import missing, tensorrt_bindings
from stand_in import INTERFACES, OWN, Context, CudaEngine, Runtime
from torch import Tensor

from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.tensorrt import engine as loading
from trtllm_replayssm.runtime.tensorrt import plan
from trtllm_replayssm.runtime.tensorrt.plan import Execution
from trtllm_replayssm.runtime.tensorrt.steps import PlanSteps


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("engines"))


def test_prefill_decode_and_verify_equal_the_embedded_engine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer kind; prompts in chunks, drafts of every number, accepted in every number."""
    sessions = Sessions(pair, monkeypatch)
    assert isinstance(sessions.theirs.steps, PlanSteps)
    for slot, length in enumerate((21, 1, 9)):
        sessions.same("admit", slot)
        sessions.same("prefill", slot, tokens(1, length, slot)[0], 8)
    for seed, (count, accepted) in enumerate(
        ((1, 1), (4, 2), (4, 1), (2, 2), (3, 0), (1, 1), (4, 4), (4, 3), (1, 1)) * 2
    ):
        sessions.same("step", tokens(3, count, 10 + seed))
        sessions.same("commit", 0, [accepted] * 3)
    assert sessions.mine.rewrites == sessions.theirs.rewrites > 6


def test_rows_between_and_without_slots(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that sit a step out, rows of unequal lengths, and a step that does not begin at slot 0."""
    sessions = Sessions(pair, monkeypatch)
    for slot in range(4):
        sessions.same("prefill", slot, tokens(1, 5 + slot, slot)[0])
    before = {name: pool[2].clone() for name, pool in sessions.theirs.pools.items()}
    lengths, active = [4, 1, 2], [True, False, True]
    sessions.step(tokens(3, 4, 7), 1, lengths, None, active)
    for name, pool in sessions.theirs.pools.items():
        now, was = (x[:, :7] if "cache" in name else x for x in (pool[2], before[name]))
        assert torch.equal(now, was), name
    sessions.same("commit", 1, [2, 0, 1])
    sessions.same("step", tokens(4, 1, 8))


def test_prompts_and_decoding_rows_in_one_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a verify step: prompt rows by the prefill profile, each in its length; the others together."""
    sessions = Sessions(pair, monkeypatch)
    for slot in (0, 1):
        sessions.same("prefill", slot, tokens(1, 13, slot)[0])
    lengths, modes = [1, 3, 9, 4], [RowMode.DECODE, RowMode.FLUSH, RowMode.ABSORB, RowMode.ABSORB]
    sessions.step(tokens(4, 9, 3), 0, lengths, modes)
    sessions.same("commit", 0, [1, 2, 9, 4])
    sessions.same("step", tokens(4, 4, 4))
    sessions.same("commit", 0, [1, 0, 2, 4])
    sessions.same("step", tokens(4, 9, 5), 0, [1, 1, 1, 2], [RowMode.DECODE] * 4, None, True)


def test_requests_move_between_slots_and_prefixes_are_materialised(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(pair, monkeypatch, snapshot_slots=1)
    sessions.same("prefill", 0, tokens(1, 9, 0)[0])
    sessions.same("step", tokens(1, 4, 1))
    sessions.same("commit", 0, [3])
    sessions.same("materialise", 0, 4, 11)
    saved = sessions.each("save", 0, "cpu")
    for session, state in zip(sessions.both, saved):
        session.restore(3, state)
        session.restore(1, session.save(4))
    sessions.step(tokens(4, 2, 2), active=[True, True, False, True])
    sessions.same("commit", 0, [2, 1, 0, 2])
    sessions.step(tokens(4, 1, 3), active=[False, True, False, True])


def test_engines_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two profiles; a token that fills the window is folded at once, a single row of a longer step is not."""
    pair = Pair(tmp_path, max_draft_len=0, max_seq_len=128, replay_window=4)
    assert len(pair.stand_in.networks[0][2]) == 2
    sessions = Sessions(pair, monkeypatch)
    sessions.same("prefill", 0, tokens(1, 5, 0)[0])
    for seed in range(9):
        sessions.same("step", tokens(1, 1, seed))
        sessions.same("commit", 0, [1])
    sessions.same("step", tokens(2, 6, 9), 0, [1, 6], [RowMode.DECODE, RowMode.ABSORB], None, True)
    sessions.same("commit", 0, [1, 6])
    sessions.same("step", tokens(2, 1, 10))


def test_a_tensorrt_of_10_14(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are copied through a scatter, and TensorRT tells nothing of aliases."""
    lacking = dict.fromkeys(("kv_cache_update", "attention_lengths", "moe", "collective", "aliases"), False)
    sessions = Sessions(Pair(tmp_path, features=lacking), monkeypatch)
    sessions.same("prefill", 1, tokens(1, 19, 0)[0])
    for seed in range(4):
        sessions.step(tokens(2, 4, seed), active=[False, True])
        sessions.same("commit", 0, [0, 2])


# ---- what is bound ---------------------------------------------------------------------------------------------------


def test_state_is_one_address_in_and_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps bind whole pools, a prefill its slot of them; every address is aligned within its memory."""
    sessions = Sessions(pair, monkeypatch)
    pair.stand_in.contexts.clear()
    session = sessions.theirs
    session.prefill(2, tokens(1, 6, 0)[0])
    session.step(tokens(3, 1, 1))
    session.step(tokens(3, 3, 1))
    prefill, decode, verify = pair.stand_in.contexts
    for name, pool in session.pools.items() | {("cursors", session.cursors)}:
        slot_bytes = session.layout[name].slot_bytes
        for context, slot in ((prefill, 2), (decode, 0), (verify, 0)):
            assert context.addresses[name] == context.addresses[f"{name}_out"] == pool.data_ptr() + slot * slot_bytes
        assert slot_bytes % 256 == 0
    small = [
        name for name in decode.addresses if name in ("input_ids", "logit_positions", "slot_ids", "query_lens", "modes")
    ]
    starts = sorted(decode.addresses[name] - session.steps.buffers["inputs"].data_ptr() for name in small)
    assert len(small) == 5
    assert starts == [0, 256, 512, 768, 1024]


def test_another_address_would_be_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in writes where it is told: with an output elsewhere the state is lost. TensorRT's own pairs are refused."""
    bind, moved = Execution.bind, []

    def elsewhere(name: str) -> Any:
        def bound(execution: Execution, shapes: Any, tensors: dict[str, Tensor]) -> None:
            moved.append(tensors[name].clone())
            bind(execution, shapes, tensors | {name: moved[-1]})

        return bound

    sessions = Sessions(pair, monkeypatch)
    monkeypatch.setattr(Execution, "bind", elsewhere("transformer.layers.0.mamba2.state_out"))
    expected, got = sessions.each("prefill", 0, tokens(1, 6, 0)[0])
    torch.testing.assert_close(got, expected, **TOLERANCE)
    expected, got = sessions.each("step", tokens(1, 1, 1))
    assert (expected - got).abs().max() > 1e-3
    monkeypatch.setattr(Execution, "bind", elsewhere("transformer.layers.6.attention.k_cache_out"))
    with pytest.raises(
        EngineError, match=r"k_cache_out must be bound to the address of transformer\.layers\.6\.attention"
    ):
        sessions.theirs.prefill(1, tokens(1, 6, 0)[0])


def test_few_executions_serve_all_steps(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded to powers of two from slot 0 on; contexts are reused, and the least used goes first."""
    session = Session(pair.load(monkeypatch))
    pair.stand_in.contexts.clear()
    for first, rows in ((0, 1), (0, 2), (1, 1), (0, 3), (2, 2), (0, 4), (3, 1)):
        session.step(tokens(rows, 1, 0), first)
    assert [context.shapes["input_ids"] for context in pair.stand_in.contexts] == [(1, 1), (2, 1), (4, 1)]
    assert [context.runs for context in pair.stand_in.contexts] == [1, 2, 4]
    assert {context.memory for context in pair.stand_in.contexts} == {session.steps.plan.memory.data_ptr()}
    monkeypatch.setattr("trtllm_replayssm.runtime.tensorrt.steps.MAX_EXECUTIONS", 2)
    session.step(tokens(1, 1, 0))
    assert [shape.rows for shape in session.steps.executions] == [4, 1]


def test_warm_up_prepares_what_steps_need_and_changes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(pair, monkeypatch)
    sessions.same("prefill", 0, tokens(1, 9, 0)[0])
    pair.stand_in.contexts.clear()
    before = {name: pool[0, ..., :9, :] if "cache" in name else pool[0] for name, pool in sessions.theirs.pools.items()}
    before = {name: pool.clone() for name, pool in before.items()}
    # Graphs are for GPUs; the contexts are made all the same.
    assert sessions.theirs.warm_up() == 0
    assert sorted(context.shapes["input_ids"] for context in pair.stand_in.contexts) == [
        (rows, count) for rows in (1, 2, 4) for count in (1, 4)
    ]
    for name, pool in sessions.theirs.pools.items():
        now = pool[0, ..., :9, :] if "cache" in name else pool[0]
        assert torch.equal(now, before[name]), name
    sessions.same("step", tokens(3, 1, 1))
    sessions.same("step", tokens(4, 4, 1))
    assert len(pair.stand_in.contexts) == 6


def test_results_are_not_overwritten_by_the_next_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(pair.load(monkeypatch))
    first = session.step(tokens(1, 1, 0))
    kept = first.clone()
    session.step(tokens(1, 1, 1))
    assert torch.equal(first, kept)


def test_a_step_that_does_not_fit_into_memory_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.load(monkeypatch)
    monkeypatch.setattr(CudaEngine, "device_memory_size_v2", 1 << 50)
    with pytest.raises(EngineError, match=r"needs 1024 TiB to work in, but cpu has \S+ \S+ free") as error:
        Session(engine)
    assert "--max_num_tokens" in error.value.hint


def test_plans_are_loaded_and_prepared_on_their_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT takes the device that is CUDA's current one, which need not be the engine's."""
    inside: list[torch.device] = []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def watched(kind: type, name: str) -> None:
        real = getattr(kind, name)

        def call(*args: Any) -> Any:
            assert inside == [torch.device("cpu")], name
            return real(*args)

        monkeypatch.setattr(kind, name, call)

    for module in (loading, plan):
        monkeypatch.setattr(module, "made_current", made_current)
    watched(Runtime, "deserialize_cuda_engine")
    watched(CudaEngine, "create_execution_context")
    watched(Context, "set_optimization_profile_async")
    Session(pair.load(monkeypatch)).step(tokens(1, 1, 0))
    assert inside == []


def test_shapes_that_tensorrt_refuses_together_are_one_sentence(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def infer_shapes(context: Context) -> list[str]:
        raise RuntimeError("inferShapes failed")

    session = Session(pair.load(monkeypatch))
    monkeypatch.setattr(Context, "infer_shapes", infer_shapes)
    with pytest.raises(EngineError, match="the engine does not take these shapes together: "):
        session.step(tokens(1, 1, 0))


# ---- logits of prefills ----------------------------------------------------------------------------------------------


def test_logits_of_all_prompt_tokens_need_an_engine_built_for_them(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = Sessions(pair, monkeypatch)
    sessions.same("step", tokens(1, 30, 0), 0, None, [RowMode.ABSORB])
    plain = Session(Pair(tmp_path, gather_context_logits=False).load(monkeypatch))
    assert plain.step(tokens(1, 30, 0), 0, modes=[RowMode.ABSORB], last_only=True).shape == (1, 1, synthetic.VOCAB_SIZE)
    with pytest.raises(UserError, match="logits of a prefill's last token only") as error:
        plain.step(tokens(1, 30, 0), 1, modes=[RowMode.ABSORB])
    assert "--gather_context_logits" in error.value.hint


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_two_ranks_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ranks = synthetic.decoder(), 2
    one = Session(Pair(tmp_path / "one", model).embedded)
    two = Pair(tmp_path / "two", model, tp_size=ranks)
    barrier, parts = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks
    rank_of = threading.local()

    def exchange(mine: Tensor) -> list[Tensor]:
        parts[rank_of.value] = mine
        barrier.wait()
        everyone = list(parts)
        barrier.wait()
        return everyone

    two.stand_in.exchange = exchange
    engines = [two.load(monkeypatch, rank) for rank in range(ranks)]

    def run(rank: int) -> list[Tensor]:
        rank_of.value = rank
        return script(Session(engines[rank]))

    def script(session: Session) -> list[Tensor]:
        first = session.prefill(1, tokens(1, 9, 0)[0])
        second = session.step(tokens(2, 4, 1), active=[False, True])[1]
        session.commit(0, [0, 2])
        return [first, second, session.step(tokens(1, 1, 2), 1)[0]]

    expected = script(one)
    with ThreadPoolExecutor(ranks) as pool:
        for logits in pool.map(run, range(ranks)):
            torch.testing.assert_close(logits, expected, **TOLERANCE)


def test_contexts_get_the_ranks_communicator(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a capsule around the pointer that torch lends."""
    waited: list[Any] = []
    monkeypatch.setattr(torch.distributed, "barrier", lambda **given: waited.append(given["group"]))
    group: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(_comm_ptr=lambda: 0xABC0))
    Session(replace(pair.load(monkeypatch), group=group)).step(tokens(1, 1, 0))
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    assert read(pair.stand_in.contexts[-1].communicator, None) == 0xABC0
    assert waited == [group]
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace())
    with pytest.raises(EngineError, match="does not lend the communicator"):
        Session(replace(pair.load(monkeypatch), group=group))


# ---- the stand-in ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("interface", INTERFACES)
def test_stand_in_has_nothing_that_tensorrt_lacks(interface: str) -> None:
    genuine = getattr(tensorrt_bindings(), interface)
    members = {name for name in vars(INTERFACES[interface]) if not name.startswith("_")} - OWN
    assert members
    assert [name for name in members if not hasattr(genuine, name)] == []
