"""Which tests run without a GPU, on the emulator of tests/emulator."""

from __future__ import annotations

import re

#: Files whose tests need nothing of a GPU but its kernels.
KERNEL_FILES = (
    *("test_copy_codes", "test_delta_folds", "test_delta_prefill", "test_delta_rule", "test_delta_verify"),
    *("test_dense", "test_full_grids", "test_mamba2", "test_mamba2_prefill", "test_materialise"),
    *("test_quantised_state", "test_shared", "test_standard"),
)
#: Of them, tests that need it after all: CUDA graphs, more memory than is touched, and two kernels that agree to the bit
#: because nvcc makes the same products and sums of both one instruction.
NEEDS_GPU = re.compile("graph|two_billion|do_not_depend_on_the_slot|plain_recurrence")

#: The tests that always run: all sources, and of each the paths that macros and rows choose among. By file and function, their
#: parameters.
CHOSEN: dict[str, dict[str, tuple[str, ...]]] = {
    "test_copy_codes": {
        "test_boundaries_of_rounding": (
            "mamba2-torch.float32-nvfp4",
            "mamba2-torch.bfloat16-nvfp4",
            "gated_delta-torch.float32-nvfp4",
            "gated_delta-torch.bfloat16-fp8",
            "kda-torch.float32-nvfp4",
        ),
    },
    "test_shared": {
        "test_advance_equals_reference": ("1-4", "4-300", "16-1"),
        "test_causal_conv": (
            "4-6144-True-1-torch.bfloat16",
            "4-70-False-16-torch.float32",
            "4-70-False-200-torch.float16",
        ),
        "test_causal_conv_of_channels_that_no_vector_may_start_at": ("2-5-torch.bfloat16",),
    },
    "test_mamba2": {
        "test_dtypes": ("1-dtypes0", "4-dtypes1", "1-dtypes2", "16-dtypes4", "4-dtypes5"),
        "test_shapes": ("8-(4, 128, 128, 2)", "1-(4, 64, 256, 2)", "33-(3, 24, 40, 3)"),
        "test_windows": ("1-1", "2-64"),
        "test_a_row_has_the_same_bits_in_small_and_large_batches": (
            "(4, 64, 128, 2)-(torch.bfloat16, torch.bfloat16)-nearest",
            "(1, 80, 64, 1)-(torch.float16, torch.float32)-nearest",
        ),
        "test_activations_that_no_vector_may_start_at": ("4-16-same",),
        "test_time_steps_that_are_no_numbers_are_not_hidden": (
            "(4, 64, 128, 2)-1-1",
            "(4, 64, 128, 2)-1-16",
            "(4, 64, 128, 2)-33-16",
            "(3, 24, 40, 3)-2-8",
        ),
        "test_tokens_that_are_no_numbers_leave_the_checkpoint_alone": ("4-dtypes0-same", "9-dtypes1-nvfp4"),
        "test_copies": (
            "1-(torch.bfloat16, torch.float32)-fp8",
            "1-(torch.bfloat16, torch.float32)-nvfp4",
            "4-(torch.float32, torch.float32)-nvfp4",
        ),
        "test_copies_of_other_shapes": ("3-(4, 128, 64, 1)-fp8", "1-(4, 48, 32, 2)-nvfp4"),
        "test_stochastic_rounding_takes_the_bits_of_the_contract": (
            "1-torch.bfloat16-torch.float16",
            "40-torch.bfloat16-torch.bfloat16",
            "1-torch.float32-torch.bfloat16",
        ),
    },
    "test_mamba2_prefill": {
        "test_lengths": ("33",),
        "test_read_copies": ("torch.float32-nvfp4", "torch.bfloat16-fp8"),
        "test_shapes": (
            "(torch.bfloat16, torch.bfloat16)-(8, 48, 64, 2)",
            "(torch.float16, torch.float32)-(8, 16, 32, 4)",
        ),
    },
    "test_quantised_state": {
        "test_steps": ("nano-1-bf16-int8", "wide-4-bf16-fp8", "odd-1-fp32-int8", "long-40-bf16-fp8")
    },
    "test_delta_rule": {
        "test_a_step_beyond_the_window_that_does_not_fold": ("4-4-1-gated_delta", "20-16-11-kda"),
        "test_tokens": ("1-gated_delta", "2-kda", "4-gated_delta", "8-kda bounded", "16-gated_delta", "16-kda"),
        "test_dtypes": ("1-kda-dtypes1", "5-gated_delta-dtypes3", "20-gated_delta-dtypes4"),
        "test_shapes": ("6-gated_delta-(192, 192)", "1-kda-(256, 96)", "6-kda-(24, 40)", "19-gated_delta-(96, 96)"),
        "test_long_verify_steps_of_wide_keys": ("9-kda-(160, 64)", "16-gated_delta-(192, 128)"),
        "test_windows": ("gated_delta-64", "kda-1"),
        "test_inputs_that_no_vector_may_start_at": ("1-1-kda-dt_bias",),
        "test_derived_fold": ("1-gated_delta", "4-kda", "20-gated_delta"),
        "test_read_copies": ("1-gated_delta-nvfp4", "4-kda-fp8", "16-gated_delta-fp8", "2-kda-nvfp4"),
        "test_read_copies_of_other_shapes": ("1-kda-(128, 40)-fp8",),
        "test_read_copies_of_hardly_open_gates": ("1-gated_delta-torch.float16-fp8",),
    },
    "test_delta_folds": {
        "test_folds_of_dtypes": ("1-gated_delta-(torch.bfloat16, torch.float32)-nvfp4",),
    },
    "test_delta_verify": {
        "test_absorbed_tokens": ("whole heads-kda-4-torch.float32",),
        "test_a_draft_that_is_no_number_leaves_tokens_before_it_alone": (
            "whole heads-gated_delta-4-torch.bfloat16",
            "whole heads-kda-16-torch.bfloat16",
        ),
        "test_random_acceptance": (
            "slices-4-kda-(torch.bfloat16, torch.float32)",
            "whole heads-8-kda-(torch.float16, torch.float16)",
        ),
    },
    "test_full_grids": {
        "test_two_heads_a_block": ("1-torch.bfloat16-same", "4-torch.float32-fp8", "1-torch.float32-nvfp4"),
        "test_whole_heads": (
            "4-gated_delta-(torch.bfloat16, torch.float32)-same",
            "1-kda-(torch.bfloat16, torch.bfloat16)-same",
            "24-gated_delta-(torch.bfloat16, torch.float32)-nvfp4",
            "8-kda-(torch.bfloat16, torch.float32)-fp8",
        ),
        "test_states_of_float16_under_the_strongest_decay": ("4",),
        "test_whole_heads_of_other_values": ("1-kda-(128, 256)",),
        "test_blocks_of_several_heads": (
            "1-(torch.bfloat16, torch.float32)-same",
            "4-(torch.float16, torch.float16)-fp8",
        ),
        "test_inputs_that_leave_shared_memory_no_tile": ("256-16-nvfp4",),
        "test_rows_of_values_that_few_warps_have_no_lanes_for": ("1024",),
    },
    "test_delta_prefill": {
        "test_shapes": (
            "few blocks-(torch.bfloat16, torch.float32)-(128, 128)",
            "many blocks-(torch.float16, torch.float16)-(64, 128)",
            "few blocks-(torch.bfloat16, torch.bfloat16)-(128, 64)",
        ),
        "test_shapes_with_decays_per_channel": (
            "few blocks-kda-torch.float32-(128, 128)",
            "many blocks-kda bounded-torch.bfloat16-(128, 64)",
        ),
        "test_histories": ("many blocks-5-gated_delta",),
        "test_read_copies": (
            "few blocks-gated_delta-(128, 128)-torch.float32-nvfp4",
            "many blocks-kda-(128, 64)-torch.bfloat16-fp8",
        ),
    },
    "test_standard": {
        "test_mamba2": ("(16, 64, 128, 2)-(torch.bfloat16, torch.bfloat16)",),
        "test_delta_rule": ("gated_delta-(torch.float16, torch.float32)",),
        "test_delta_rule_shapes": ("kda-(256, 96)",),
    },
    "test_materialise": {
        "test_equals_the_reference": (
            "torch.float32-mamba2",
            "torch.bfloat16-gated_delta-derived",
            "torch.float32-kda-wide",
        ),
        "test_ring_dtypes": ("mamba2-torch.float32", "kda-torch.float16"),
    },
    "test_dense": {
        "test_decode_attention": (
            "5-150-nano-torch.bfloat16-4",
            "5-150-qwen-torch.float32-1",
            "2-700-many-torch.float16-16",
            "2-700-small_latent-torch.float32-4",
        ),
        "test_cache_update_writes_valid_tokens_and_nothing_else": ("2-128-torch.bfloat16", "3-5-torch.float32"),
        "test_rope": ("256-64-False", "64-64-True"),
        "test_rms_norm": ("plain-33-1-torch.bfloat16", "sum-130-2-torch.float32"),
        "test_gates": ("7-torch.bfloat16",),
        "test_row_linear": ("False-4-1-3", "True-1000-7-8", "False-256-1037-1"),
        "test_route": ("8-3-4-2-sigmoid", "128-6-1-1-softmax"),
        "test_experts": ("torch.bfloat16-relu2-limits0-37-128-6",),
    },
}
#: Of them, those whose sources are compiled for compute capability 10.3, where 4-bit codes have conversions of their own.
BLACKWELL = {
    "test_copies[1-(torch.bfloat16, torch.float32)-nvfp4]",
    "test_read_copies[1-gated_delta-nvfp4]",
    "test_read_copies[few blocks-gated_delta-(128, 128)-torch.float32-nvfp4]",
}


def is_chosen(file: str, test: str) -> bool:
    """``test``: the function's name and, in brackets, its parameters."""
    function, _, parameters = test.partition("[")
    return parameters.removesuffix("]") in CHOSEN.get(file, {}).get(function, ())
