"""The plain computation of Kimi-K3 against the model's own code, of which llm-compressor carries a copy that runs on a CPU.

Its KDA kernels and its convolution need a GPU; plain computations stand in for them here, so that of KDA only what is around
the recurrence is compared.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from hf_models import build, random_ids, reference_logits
from torch import Tensor, nn

#: Filled by make, from remote_code.txt.
PACKAGES = Path(sys.prefix, "remote-code")
pytestmark = pytest.mark.skipif(not PACKAGES.exists(), reason=f"{PACKAGES} has no packages; see the Makefile")


class ShortConvolution(nn.Module):
    """Depthwise and causal, with SiLU behind it."""

    def __init__(self, hidden_size: int, kernel_size: int, activation: str) -> None:
        super().__init__()
        assert activation == "silu"
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size))

    def forward(self, x: Tensor, **state: Any) -> tuple[Tensor, None]:
        channels, _, kernel = self.weight.shape
        padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
        return F.silu(F.conv1d(padded, self.weight, groups=channels)).transpose(1, 2), None


class FusedRMSNormGated(nn.Module):
    """Norm, weight, then gate."""

    def __init__(self, size: int, eps: float, activation: str) -> None:
        super().__init__()
        assert activation == "sigmoid"
        self.weight, self.epsilon = nn.Parameter(torch.empty(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon) * gate.sigmoid()


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    safe_gate: bool,
    **switches: Any,
) -> tuple[Tensor, None]:
    """q, k, v and g ``[rows, T, H, D]``, as fla's kernels take them, to the output ``[rows, T, H, D]``."""
    on = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")
    assert all(switches[name] for name in on)
    assert safe_gate == (lower_bound is not None)
    bias, rows = dt_bias.double().numpy().reshape(A_log.shape[0], -1), []
    for row in zip(*(tensor.double().numpy() for tensor in (q, k, v, g, beta))):
        decays = oracle.kda_gates(row[3], row[4], A_log.double().numpy(), bias, lower_bound)
        rows.append(torch.from_numpy(oracle.delta_rule(*row[:3], *decays)[0]))
    return torch.stack(rows).to(q.dtype), None


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(members)
    made.__path__ = []
    return made


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The model's code, without the packages that it only needs on a GPU or for calibration."""
    monkeypatch.syspath_prepend(PACKAGES)
    code = module("kimi_k3_code")
    code.__path__ = [str(PACKAGES / "llmcompressor" / "modeling" / "kimi_k3")]
    stand_ins = [
        *(module(name) for name in ("fla", "fla.ops", "fla.ops.utils", "llmcompressor", "llmcompressor.modeling")),
        module("fla.modules", ShortConvolution=ShortConvolution, FusedRMSNormGated=FusedRMSNormGated),
        module("fla.ops.kda", chunk_kda=kda, fused_recurrent_kda=kda),
        # Of batches with padding.
        module("fla.ops.utils.index", prepare_cu_seqlens_from_mask=None, prepare_lens_from_mask=None),
        module("fla.utils", tensor_cache=lambda function: function),
        module("llmcompressor.modeling.moe"),
        module("llmcompressor.modeling.moe.context", get_calibrate_all_experts_flag=lambda: False),
        code,
    ]
    for stand_in in stand_ins:
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return import_module("kimi_k3_code.modeling_kimi_linear")


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k3_text"])
def test_the_plain_computation_equals_the_models_code(name: str, remote: ModuleType) -> None:
    ours, ids = build(name), random_ids(2, 24)
    # The code knows no shared expert only by null.
    values = ours.text | {"num_shared_experts": ours.text["num_shared_experts"] or None}
    config = remote.KimiLinearConfig(**values, attn_implementation="eager")
    model = remote.KimiLinearForCausalLM(config).eval()
    tensors = {name.removeprefix("language_model."): tensor for name, tensor in ours.tensors.items()}
    heads = ours.text["linear_attn_config"]["num_heads"]
    # Padded in the published files, not in the code's parameters.
    tensors |= {name: tensor[:heads] for name, tensor in tensors.items() if name.endswith("A_log")}
    model.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert float((logits - reference_logits(ours, ids)).abs().max()) < 1e-4
