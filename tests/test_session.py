"""Sessions: rollback, slots, snapshots, chunks and refusals, on a decoder with every layer kind."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import synthetic
import torch
from synthetic import VOCAB_SIZE

from trtllm_replayssm.errors import UserError
from trtllm_replayssm.plugins.cursors import Cursor, RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions, Engine
from trtllm_replayssm.runtime.session import Session

#: fp32 logits of standard deviation 1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Four slots, windows and drafts as ``make`` asks for them."""
    folder = tmp_path_factory.mktemp("session") / "engine"
    options = BuildOptions(max_batch_size=4, max_seq_len=1500, max_num_tokens=8192)
    return synthetic.load(synthetic.write_engine(folder, options=options))


def make(
    engine: Engine, window: int = 8, max_draft_len: int = 0, poison: float = math.nan, snapshots: int = 0
) -> Session:
    """A session whose pools hold ``poison``: nothing may depend on what a slot held before."""
    session = Session(synthetic.with_replay(engine, window=window, max_draft_len=max_draft_len), snapshots)
    for pool in session.pools.values():
        pool.fill_(poison)
    return session


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (rows, length), generator=torch.Generator().manual_seed(seed))


def oracle(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[rows, length, vocab]`` of one pass that never drafts, never uses a ring."""
    session = make(engine)
    return torch.cat([session.step(row[None], slot, modes=[RowMode.ABSORB]) for slot, row in enumerate(ids)])


def decode(session: Session, ids: torch.Tensor, slot: int = 0) -> torch.Tensor:
    """Logits ``[length, vocab]`` of one-token steps over ``ids [length]``."""
    out = []
    for token in ids:
        out.append(session.step(token[None, None], slot)[0, 0])
        session.commit(slot, [1])
    return torch.stack(out)


def check_cursors(session: Session) -> None:
    """The host's copy follows the device, and no ring holds more than the window."""
    assert torch.equal(session.host[:, :2], session.cursors[:, :2].cpu())
    held = session.host[:, Cursor.COMMITTED] - session.host[:, Cursor.FOLDED]
    assert ((held >= 0) & (held <= session.replay.window)).all()


# ---- rollback --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [8, 16, 32])
def test_random_acceptance_equals_a_decoder_that_never_drafted(engine: Engine, window: int) -> None:
    """200 verify steps of 1 to 8 tokens, two rows with different prompts and different acceptance."""
    rng, rows, steps = random.Random(window), 2, 200
    session = make(engine, window, max_draft_len=7)
    ids = tokens(rows, 16 + 8 * steps)
    for row, prompt in enumerate((5, 9)):
        session.prefill(row, ids[row, :prompt])
    seen: list[dict[int, torch.Tensor]] = [{}, {}]
    for step in range(steps):
        length, start = rng.randint(1, 8), session.committed()
        accepted = [rng.randint(1, length) for _ in range(rows)]
        drafts = torch.stack([ids[r, start[r] : start[r] + length] for r in range(rows)])
        for row in range(rows):
            drafts[row, accepted[row] :] = (drafts[row, accepted[row] :] + 1 + step) % VOCAB_SIZE
        modes = [rng.choice((RowMode.DECODE, RowMode.DECODE, RowMode.FLUSH)) for _ in range(rows)]
        logits = session.step(drafts, modes=modes)
        if length == 1 or step % 7:
            session.commit(0, accepted)
        else:  # nothing accepted at all: the step may as well not have been
            continue
        check_cursors(session)
        for row in range(rows):
            seen[row] |= {start[row] + i: logits[row, i] for i in range(accepted[row])}
    for row in range(rows):
        expected = oracle(engine, ids[row : row + 1, : session.committed()[row]])[0]
        assert len(seen[row]) > 300
        for position, logits in seen[row].items():
            torch.testing.assert_close(logits, expected[position], rtol=0, atol=TOLERANCE)


def test_window_of_one_is_the_ordinary_recurrence(engine: Engine) -> None:
    ids = tokens(1, 40)
    session = make(engine, window=1)
    session.prefill(0, ids[0, :7])
    torch.testing.assert_close(decode(session, ids[0, 7:]), oracle(engine, ids)[0, 7:], rtol=0, atol=TOLERANCE)
    assert session.host[0, Cursor.FOLDED] == 40


def test_forced_flush_folds_the_committed_tokens(engine: Engine) -> None:
    session = make(engine, window=8, max_draft_len=3)
    session.prefill(0, tokens(1, 5)[0])
    session.step(tokens(1, 3))
    session.commit(0, [3])
    assert session.host[0, Cursor.FOLDED] == 5
    session.step(tokens(1, 2), modes=[RowMode.FLUSH])
    assert session.host[0, Cursor.FOLDED] == 8
    check_cursors(session)


# ---- prefill and batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 31, 60])
def test_prefill_in_chunks_of_any_size(engine: Engine, chunk: int) -> None:
    ids = tokens(1, 60)
    expected = oracle(engine, ids)[0]
    session = make(engine)
    torch.testing.assert_close(session.prefill(0, ids[0, :50], chunk), expected[49], rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(decode(session, ids[0, 50:]), expected[50:], rtol=0, atol=TOLERANCE)


def test_rows_of_unequal_length_with_prefill_and_decode_in_one_step(engine: Engine) -> None:
    ids = tokens(3, 30)
    expected = oracle(engine, ids)
    session = make(engine, window=8, max_draft_len=2)
    step = torch.full((3, 20), -1)
    step[0, :1], step[1, :20], step[2, :13] = ids[0, :1], ids[1, :20], ids[2, :13]
    lengths = [1, 20, 13]
    last = session.step(step, 0, lengths, modes=[RowMode.ABSORB] * 3, last_only=True)
    session.commit(0, lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(last[row, 0], expected[row, length - 1], rtol=0, atol=TOLERANCE)
    mixed = torch.zeros(3, 6, dtype=torch.long)
    mixed[0], mixed[1, :3], mixed[2, :2] = ids[0, 1:7], ids[1, 20:23], ids[2, 13:15]
    modes = [RowMode.ABSORB, RowMode.DECODE, RowMode.DECODE]
    logits = session.step(mixed, 0, [6, 3, 2], modes)
    session.commit(0, [6, 3, 2])
    for row, (start, length) in enumerate(((1, 6), (20, 3), (13, 2))):
        torch.testing.assert_close(logits[row, :length], expected[row, start : start + length], rtol=0, atol=TOLERANCE)
    check_cursors(session)


def test_inactive_rows_leave_their_slots_alone(engine: Engine) -> None:
    ids = tokens(3, 20)
    session = make(engine, window=8)
    for slot in (0, 1, 2):
        session.prefill(slot, ids[slot, :9])
    before = session.save(1)
    session.step(ids[:, 9:10], active=[True, False, True])
    session.commit(0, [1, 0, 1])
    after = session.save(1)
    assert after.cursors == before.cursors
    assert all(same(after.tensors[n], t) for n, t in before.tensors.items())
    assert session.committed() == [10, 9, 10, 0]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_recycled_slot_is_as_good_as_new_whatever_it_holds(engine: Engine) -> None:
    """Not one bit of the output depends on what the pools held, be it NaN, infinity or another request's state."""
    ids, outputs = tokens(2, 30), []
    for poison in (0.0, math.nan, math.inf):
        session = make(engine, window=8, max_draft_len=2, poison=poison)
        outputs.append(torch.cat([session.prefill(0, ids[0, :6], 4)[None], decode(session, ids[0, 6:])]))
    session.admit(0)
    session.prefill(0, ids[1])
    session.admit(0)
    outputs.append(torch.cat([session.prefill(0, ids[0, :6], 4)[None], decode(session, ids[0, 6:])]))
    assert torch.isfinite(outputs[0]).all()
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


# ---- preempt, resume, materialise ------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 4, 8])
def test_preempt_and_resume_in_another_slot_at_every_ring_phase(engine: Engine, window: int) -> None:
    """Bit for bit, while the first slot serves another request in between."""
    ids = tokens(1, 40)[0]
    undisturbed = make(engine, window)
    undisturbed.prefill(0, ids[:5])
    expected = decode(undisturbed, ids[5:])
    session = make(engine, window)
    session.prefill(0, ids[:5])
    slot = 0
    for phase in range(2 * window + 1):
        logits = decode(session, ids[5 + phase : 6 + phase], slot)
        assert torch.equal(logits[0], expected[phase])
        state = session.save(slot)
        session.admit(slot)
        session.prefill(slot, tokens(1, 11, seed=phase)[0])
        slot = (slot + 1) % 4
        session.restore(slot, state)
        assert session.slot_cursors(slot) == state.cursors
        check_cursors(session)


def test_saved_state_holds_the_kv_cache_only_up_to_the_cursor(engine: Engine) -> None:
    session = make(engine)
    session.prefill(0, tokens(1, 5)[0])
    small = session.save(0).nbytes
    session.prefill(0, tokens(1, 5)[0])
    kv_per_token = sum(2 * 32 * 4 if "k_cache" in n else 40 * 4 if "latent" in n else 0 for n in session.pools)
    assert session.save(0).nbytes - small == 5 * kv_per_token


@pytest.mark.parametrize("fold", ["exact", "derived"])
def test_materialise_at_every_ring_phase(engine: Engine, fold: str) -> None:
    """Prefixes at and before the cursor go on like a request that ends there."""
    ids = tokens(1, 60)[0]
    expected = oracle(engine, ids[None])[0]
    window, drafts = 8, 3
    session = Session(synthetic.with_replay(engine, window=window, max_draft_len=drafts, fold=fold), snapshot_slots=1)
    for pool in session.pools.values():
        pool.fill_(math.nan)
    session.prefill(0, ids[:7])
    phases = set()
    for _ in range(14):
        start = session.committed()[0]
        session.step(ids[None, start : start + 3])
        session.commit(0, [2])
        cursors = session.slot_cursors(0)
        phases.add(cursors.committed - cursors.folded)
        for back in (0, 1, 2, 3):
            prefix = cursors.committed - back
            if prefix < max(cursors.folded, cursors.written - drafts - 1):
                with pytest.raises(UserError, match="cannot give its first"):
                    session.materialise(0, 4, prefix)
                continue
            session.materialise(0, 4, prefix)  # into the snapshot slot
            session.restore(1, session.save(4))
            logits = decode(session, ids[prefix : prefix + 3], slot=1)
            torch.testing.assert_close(logits, expected[prefix : prefix + 3], rtol=0, atol=TOLERANCE)
            assert session.slot_cursors(0) == cursors
    assert phases >= {2, 4, 6}


def test_a_materialised_slot_forgets_its_former_request(engine: Engine) -> None:
    ids = tokens(2, 30)
    session = make(engine)
    session.prefill(1, ids[1])
    session.prefill(0, ids[0, :12])
    session.materialise(0, 1, 12)
    assert torch.allclose(decode(session, ids[0, 12:20], 1), oracle(engine, ids[:1])[0, 12:20], rtol=0, atol=TOLERANCE)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(session: Session, match: str, *args: object, **kwargs: object) -> None:
    """The step is refused, and the session is as it was."""
    before = session.host.clone(), session.cursors.clone(), session.pending.clone()
    with pytest.raises(UserError, match=match):
        session.step(*args, **kwargs)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, (session.host, session.cursors, session.pending)))


def test_steps_that_do_not_fit_are_refused_before_anything_changes(engine: Engine) -> None:
    session = make(engine, window=8, max_draft_len=2)
    session.prefill(0, tokens(1, 5)[0])
    refused(session, "token id 51 is outside", torch.tensor([[VOCAB_SIZE]]))
    refused(session, "token id -1 is outside", torch.tensor([[-1]]))
    refused(session, "5 rows from slot 0 do not fit", tokens(5, 1))
    refused(session, "1 rows from slot 4 do not fit", tokens(1, 1), 4)
    refused(session, "at most 3 tokens, got 4", tokens(1, 4))
    refused(session, "exceed max_seq_len 1500", tokens(1, 1496), modes=[RowMode.ABSORB])
    refused(session, "more than max_num_tokens", tokens(4, 2049), modes=[RowMode.ABSORB] * 4)
    refused(session, "query_lens are", tokens(1, 2), query_lens=[3])
    refused(session, "one value for each of 2 rows", tokens(2, 1), query_lens=[1])
    refused(session, "modes are", tokens(1, 1), modes=[7])
    refused(session, "must be integers", torch.zeros(1, 1))
    refused(session, "not a table of integers", [[1, 2], [3]])


def test_drafts_may_pass_the_end_but_not_the_sampled_token(engine: Engine) -> None:
    session = make(engine, window=8, max_draft_len=3)
    session.prefill(0, tokens(1, 1499)[0])
    session.step(tokens(1, 4))
    session.commit(0, [1])
    refused(session, "exceed max_seq_len 1500", tokens(1, 1))


def test_commit_of_more_than_the_step_held_is_refused(engine: Engine) -> None:
    session = make(engine, window=4, max_draft_len=3)
    session.step(tokens(1, 3))
    for wrong in ([4], [-1]):
        with pytest.raises(UserError, match="at most 3 tokens"):
            session.commit(0, wrong)
    session.commit(0, [3])
    with pytest.raises(UserError, match="at most 0 tokens"):
        session.commit(0, [1])
    session.step(tokens(1, 1))  # the window is full: this token is folded at once
    with pytest.raises(UserError, match="exactly 1 tokens"):
        session.commit(0, [0])
    refused(session, "must be committed first", tokens(1, 1))
    with pytest.raises(UserError, match="must be committed first"):
        session.save(0)
    session.commit(0, [1])
    assert session.committed()[0] == 4


def test_a_folded_step_waits_for_its_own_commit(engine: Engine) -> None:
    """Slots around it step and are committed in the meantime."""
    session, alone = (make(engine, window=4, max_draft_len=1) for _ in range(2))
    prompt, ids = tokens(1, 9), tokens(3, 2)
    session.step(prompt, 1, modes=[RowMode.ABSORB])
    session.step(ids, active=[True, False, True])
    with pytest.raises(UserError, match="slot 1 can commit exactly 9 tokens of its last step, not 3"):
        session.commit(0, [2, 3, 2])
    session.commit(0, [2, 0, 2])
    assert session.committed()[:3] == [2, 0, 2]
    with pytest.raises(UserError, match="must be committed first"):
        session.step(ids)
    session.commit(1, [9])
    alone.prefill(1, prompt[0])
    torch.testing.assert_close(session.step(ids)[1:2], alone.step(ids[1:2], 1), rtol=1e-5, atol=1e-5)


def test_slots_that_do_not_exist_and_states_of_other_engines_are_refused(engine: Engine, tmp_path: Path) -> None:
    session = make(engine)
    with pytest.raises(UserError, match="slot 9 does not exist"):
        session.admit(9)
    with pytest.raises(UserError, match="slot 9 does not exist"):
        session.prefill(9, [1])
    with pytest.raises(UserError, match="slot -1 does not exist"):
        session.commit(-1, [0])
    with pytest.raises(UserError, match="chunk is 0"):
        session.prefill(0, [1], chunk=0)
    with pytest.raises(UserError, match="must be integers"):
        session.prefill(0, [])
    session.prefill(0, tokens(1, 3)[0])
    with pytest.raises(UserError, match="two different slots"):
        session.materialise(0, 0, 3)
    other = Session(synthetic.load(synthetic.write_engine(tmp_path / "other", seed=5)))
    with pytest.raises(UserError, match="belongs to another engine"):
        other.restore(0, session.save(0))


def test_bytes_are_accounted_by_kind(engine: Engine) -> None:
    session = Session(synthetic.with_replay(engine, window=16), snapshot_slots=2)
    counted = session.state_bytes()
    assert set(counted) == {"state", "ring", "conv", "kv", "cursor"}
    assert counted["state"] == 6 * 4 * (8 * 16 * 16 + 3 * 4 * 16 * 16)
    assert counted["cursor"] == 6 * 256
    assert sum(counted.values()) == 6 * session.engine.config.slot_bytes()


def test_state_in_16_bits_stays_close(tmp_path: Path) -> None:
    replay = ReplayConfig(window=8, state_dtype="bfloat16")
    engine = synthetic.load(synthetic.write_engine(tmp_path / "engine", dtype="bfloat16", replay=replay))
    ids = tokens(1, 60)
    full = synthetic.load(synthetic.write_engine(tmp_path / "full"))
    session = make(engine)
    session.prefill(0, ids[0, :20])
    got, expected = decode(session, ids[0, 20:]), oracle(full, ids)[0, 20:]
    assert session.pools["transformer.layers.0.mamba2.state"].dtype == torch.bfloat16
    assert 0 < (got - expected).norm() / expected.norm() < 0.1
