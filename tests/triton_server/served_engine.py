"""The tiny engine that tests serve: every recurrence, and attention."""

from __future__ import annotations

import json
from pathlib import Path

import synthetic
from served_ranks import MAX_SEQ_LEN

from trtllm_replayssm.builders.layers.attention import Attention
from trtllm_replayssm.builders.layers.gated_delta import GatedDelta
from trtllm_replayssm.builders.layers.kda import Kda
from trtllm_replayssm.builders.layers.mamba2 import Mamba2
from trtllm_replayssm.builders.model import HybridDecoder
from trtllm_replayssm.runtime.engine import BuildOptions

LAYERS = (
    Mamba2(num_heads=4, head_dim=8, state_size=8, n_groups=2, conv_kernel=4, norm_epsilon=1e-5),
    GatedDelta(num_key_heads=2, num_value_heads=2, key_dim=8, value_dim=8, conv_kernel=4, norm_epsilon=1e-6),
    Kda(num_heads=2, head_dim=8, conv_kernel=4, norm_epsilon=1e-6),
    Attention(2, 2, 16, 0.25),
)
#: Fewer slots than clients, so that some wait.
OPTIONS = BuildOptions(max_batch_size=6, max_seq_len=MAX_SEQ_LEN, max_num_tokens=120, replay_window=8, max_draft_len=3)
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_engine(folder: Path, tp_size: int = 1) -> Path:
    model = HybridDecoder(synthetic.TEXT_VOCAB_SIZE, 32, 1e-5, LAYERS)
    # No end token: random weights would end texts where nobody expects it.
    synthetic.write_engine(folder, model, OPTIONS, text=True, tp_size=tp_size, eos_token_ids=())
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": TEMPLATE}))
    return folder
