"""The options of ReplaySSM, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trtllm_replayssm.errors import UserError

#: Most tokens of one request that a decode or verify step takes (one sampled token and the drafts behind it).
MAX_VERIFY_TOKENS = 16

Fold = Literal["exact", "derived"]
ReadDtype = Literal["same", "fp8", "nvfp4"]
Rounding = Literal["nearest", "stochastic"]

#: dtypes of a checkpoint: floating point, and quantised with scales.
FLOAT_STATES, QUANTISED_STATES = ("float32", "bfloat16", "float16"), ("int8", "fp8")


@dataclass(frozen=True)
class ReplayConfig:
    """How recurrent state is kept between steps.

    window: committed tokens a request may hold in its ring before they are folded into the checkpoint; 1 rewrites
        the state at every step, like an ordinary engine.
    max_draft_len: most draft tokens verified in one step; 0 for plain decoding.
    state_dtype: dtype of the checkpoint, ``float32``, ``bfloat16`` or ``float16``, or ``int8`` or ``fp8`` with a scale for
        each row (plugins/quantised_state.py). The recurrence itself is always computed in float32.
    state_rounding: how a 16-bit checkpoint of a Mamba-2 layer is rounded: to the ``nearest``, or ``stochastic``
        (plugins/rounding.py).
    force_quantised_state: let delta-rule layers have an 8-bit checkpoint, too, whose rounding feeds back into their updates.
    ring_dtype: dtype of the ring's activations (Mamba-2 ``x`` and ``B``; delta-rule ``k`` and ``v``, or ``u``).
        ``auto`` is the activation dtype, which loses nothing; for derived ``u`` it is float16 in 16-bit models,
        because float16 keeps eight times more of ``u`` than bfloat16. Gates, time steps and beta are float32.
    fold: how a delta-rule layer moves ring rows into its checkpoint. ``exact`` runs the recurrence again over the raw
        inputs; ``derived`` adds up stored updates ``u``, whose rounding then stays in the state.
        Mamba-2 updates do not depend on the state, so both are the same there.
    state_read_dtype: what decode and verify steps read instead of the checkpoint: ``fp8`` or ``nvfp4``, a narrow copy that
        lies beside it (plugins/read_copy.py), or ``same`` for the checkpoint itself. Folds read the checkpoint in any case.

    Raises UserError when the values cannot work together.
    """

    window: int = 16
    max_draft_len: int = 0
    state_dtype: str = "float32"
    ring_dtype: str = "auto"
    fold: Fold = "exact"
    state_read_dtype: ReadDtype = "same"
    state_rounding: Rounding = "nearest"
    force_quantised_state: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.window <= 64:
            raise UserError(f"replay_window is {self.window}; it must be 1 to 64", "16 suits most models")
        if not 0 <= self.max_draft_len < MAX_VERIFY_TOKENS:
            raise UserError(
                f"max_draft_len is {self.max_draft_len}; it must be 0 to {MAX_VERIFY_TOKENS - 1}",
                "a verify step takes the sampled token and its drafts, 16 tokens at most",
            )
        if self.max_draft_len and self.window < self.verify_tokens:
            raise UserError(
                f"replay_window {self.window} is shorter than a verify step of {self.verify_tokens} tokens",
                f"set --replay_window to {self.verify_tokens} or more, or lower --max_draft_len",
            )
        if self.state_dtype not in FLOAT_STATES + QUANTISED_STATES:
            raise UserError(
                f"state_dtype {self.state_dtype!r} is not known", f"use {', '.join(FLOAT_STATES + QUANTISED_STATES)}"
            )
        if self.ring_dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise UserError(f"ring_dtype {self.ring_dtype!r} is not known", "use auto, float32, bfloat16 or float16")
        if self.fold not in ("exact", "derived"):
            raise UserError(f"replay_fold {self.fold!r} is not known", "use exact or derived")
        if self.state_read_dtype not in get_args(ReadDtype):
            raise UserError(f"state_read_dtype {self.state_read_dtype!r} is not known", "use same, fp8 or nvfp4")
        if self.fold == "derived" and self.state_read_dtype != "same":
            raise UserError(
                f"replay_fold derived does not go with state_read_dtype {self.state_read_dtype}",
                "stored updates that were computed from a rounded copy would stay in the state; use --replay_fold exact",
            )
        if self.quantised_state and self.state_read_dtype != "same":
            raise UserError(
                f"state_dtype {self.state_dtype} does not go with state_read_dtype {self.state_read_dtype}",
                "a read copy is for a checkpoint that is more exact than it",
            )
        if self.state_rounding not in get_args(Rounding):
            raise UserError(f"state_rounding {self.state_rounding!r} is not known", "use nearest or stochastic")
        if self.state_rounding == "stochastic" and self.state_dtype not in ("bfloat16", "float16"):
            raise UserError(
                f"state_rounding stochastic does not go with state_dtype {self.state_dtype}",
                "16-bit states can be rounded at random: --state_dtype float16 or bfloat16",
            )

    @property
    def quantised_state(self) -> bool:
        """Whether the checkpoint has 8-bit codes with scales."""
        return self.state_dtype in QUANTISED_STATES

    @property
    def verify_tokens(self) -> int:
        """Most tokens of one request in a decode or verify step."""
        return self.max_draft_len + 1

    @property
    def ring_rows(self) -> int:
        """Rows of a slot's ring: the committed window and, behind it, the tokens of one verify step."""
        return self.window + (self.verify_tokens if self.max_draft_len else 0)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
