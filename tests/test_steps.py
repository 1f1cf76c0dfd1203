"""Steps on their way to the device: buckets, staging, reading back, and engines with random weights. No GPU needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import synthetic as models
import torch
from hypothesis import given
from hypothesis import strategies as st

from trtllm_replayssm.builders.checkpoint import CheckpointConfig
from trtllm_replayssm.builders.layers.base import Layer
from trtllm_replayssm.errors import EngineError, UserError
from trtllm_replayssm.plugins.cursors import RowMode
from trtllm_replayssm.replay import ReplayConfig
from trtllm_replayssm.runtime.engine import BuildOptions
from trtllm_replayssm.runtime.graphs import StepShape, graphs_wanted
from trtllm_replayssm.runtime.readback import Arriving
from trtllm_replayssm.runtime.rows import Rows
from trtllm_replayssm.runtime.session import Session
from trtllm_replayssm.runtime.staging import Staging
from trtllm_replayssm.runtime.steps import kv_bucket, row_bucket
from trtllm_replayssm.runtime.synthetic import synthetic_checkpoint, synthetic_engine, synthetic_weights

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parent / "data" / "configs"


@given(count=st.integers(1, 600), most=st.integers(1, 600))
def test_a_bucket_holds_its_rows_and_no_more_than_there_are_slots(count: int, most: int) -> None:
    bucket = row_bucket(min(count, most), most)
    assert min(count, most) <= bucket <= most
    assert row_bucket(bucket, most) == bucket  # a full bucket is one of its own
    assert bucket < 2 * count or bucket == 1


@given(length=st.integers(0, 9000), most=st.integers(1, 9000))
def test_a_bucket_of_positions_holds_them(length: int, most: int) -> None:
    length = min(length, most)
    assert length <= kv_bucket(length, most) <= most
    assert kv_bucket(length, most) <= max(256, 2 * length)


def test_buckets_are_few() -> None:
    assert sorted({row_bucket(n, 256) for n in range(1, 257)}) == [1, 2, 4, 8, 16, *range(32, 257, 32)]
    assert sorted({kv_bucket(n, 4099) for n in range(1, 4100)}) == [256, 512, 1024, 2048, 4096, 4099]


def test_inputs_of_a_graph_lie_behind_each_other() -> None:
    shape = StepShape(3, 2, 256, False)
    buffer = torch.arange(shape.input_size, dtype=torch.int32)
    ids, slots, lengths, modes = shape.inputs(buffer)
    assert ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert [slots.tolist(), lengths.tolist(), modes.tolist()] == [[6, 7, 8], [9, 10, 11], [12, 13, 14]]
    ids[1, 1] = 77
    assert buffer[3] == 77


def test_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTLLM_REPLAYSSM_CUDA_GRAPHS", raising=False)
    assert graphs_wanted()
    monkeypatch.setenv("TRTLLM_REPLAYSSM_CUDA_GRAPHS", "0")
    assert not graphs_wanted()


def test_a_cpu_needs_no_staging() -> None:
    tensor = torch.tensor([1, 2], dtype=torch.int32)
    assert Staging(CPU).send(tensor)[0] is tensor


def test_a_buffer_is_used_again_when_its_copy_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never waits for one: while all are under way, there is another."""

    class Event:
        ended = True

        def query(self) -> bool:
            return self.ended

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    staging = Staging(CPU)
    taken = []
    for _ in range(3):
        taken.append(staging.buffer(10))
        taken[-1][1].ended = False  # type: ignore[attr-defined]
    assert len({buffer.data_ptr() for buffer, _ in taken}) == 3
    taken[0][1].ended = True  # type: ignore[attr-defined]
    buffer, event = staging.buffer(5000)
    assert event is taken[0][1]
    assert len(buffer) == 5000
    # The oldest is under way still.
    assert staging.buffer(1)[1] not in [event for _, event in taken]


def test_a_tensor_on_its_way_stays_as_it_was() -> None:
    tokens = torch.tensor([1, 2])
    arriving = Arriving(tokens)
    tokens += 10
    assert arriving.get().tolist() == [1, 2]
    assert arriving.get().tolist() == [1, 2]


def test_pieces_of_any_slots_become_rows_without_gaps() -> None:
    rows = Rows.of({5: [7], 3: [1, 2, 3]}, width=2)
    assert (rows.first, rows.lengths) == (3, [3, 0, 1])
    assert rows.token_ids.tolist() == [[1, 2, 3], [0, 0, 0], [7, 0, 0]]
    assert Rows.of({0: [4]}, width=2).token_ids.tolist() == [[4, 0]]


# ---- random weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", models.LAYERS, ids=lambda layer: layer.kind)
def test_random_weights_make_finite_logits(layer: Layer) -> None:
    checkpoint = CheckpointConfig("Test", "float32", 1, models.decoder((layer, layer)), ReplayConfig())
    engine = synthetic_engine(checkpoint, BuildOptions(2, 64, 64), "cpu", seed=3)
    session = Session(engine)
    logits = session.step([[1] * 20, [2] * 20], modes=[RowMode.ABSORB] * 2)
    assert logits.isfinite().all()
    assert 0.2 < float(logits.std()) < 5
    again = synthetic_weights(checkpoint, CPU, 3)
    assert all(torch.equal(weight, again[name]) for name, weight in engine.weights.items())
    other = synthetic_weights(checkpoint, CPU, 4)
    assert any(not torch.equal(weight, other[name]) for name, weight in engine.weights.items())


def test_decays_are_those_of_trained_models() -> None:
    checkpoint = CheckpointConfig("Test", "bfloat16", 1, models.decoder(), ReplayConfig())
    weights = synthetic_weights(checkpoint, CPU)
    assert {"A_log", "dt_bias"} <= {name.rpartition(".")[2] for name in weights}
    for name, weight in weights.items():
        if name.endswith("A_log"):
            assert weight.dtype == torch.float32
            assert ((weight.exp() >= 1) & (weight.exp() <= 16)).all()
        if name.endswith("dt_bias"):
            steps = torch.nn.functional.softplus(weight)
            assert ((steps > 0.9e-3) & (steps < 1.1e-1)).all()


def test_ranks_hold_parts_of_their_own_and_the_same_copies() -> None:
    checkpoint = CheckpointConfig("Test", "float32", 2, models.decoder(), ReplayConfig())
    first, second = (synthetic_weights(checkpoint, CPU, 0, rank) for rank in range(2))
    parameters = checkpoint.decoder.parameters(2)
    for name, weight in first.items():
        assert weight.shape == parameters[name].local_shape(2)
        if parameters[name].axis is None:
            assert torch.equal(weight, second[name])
        elif weight.ndim > 1:
            assert not torch.equal(weight, second[name])


def test_a_published_config_is_enough() -> None:
    checkpoint = synthetic_checkpoint(CONFIGS / "nemotron_3_nano_30b_a3b.json")
    elements = sum(torch.Size(shape).numel() for _, shape in checkpoint.rank_layout().values())
    assert round(elements / 1e9, 1) == 31.6
    with pytest.raises(EngineError, match="the engine needs 58"):
        synthetic_engine(checkpoint, BuildOptions(1), "cpu")
    with pytest.raises(UserError, match="is not a file"):
        synthetic_checkpoint(CONFIGS / "none.json")
