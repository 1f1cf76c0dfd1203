#!/usr/bin/env bash
# From a Hugging Face folder to text, with the command line.
# Usage: convert_build_generate.sh MODEL_DIR WORK_DIR [PROMPT]
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n '3s/^# //p' "$0" >&2; exit 2; }
model_dir=$1 work_dir=$2 prompt=${3:-"The state of a request is"}

# What is in the folder, and what will a request cost?
trtllm-replayssm inspect "$model_dir" --max_draft_len 3

# A TensorRT-LLM checkpoint: config.json and one rank{N}.safetensors per rank.
trtllm-replayssm convert --model_dir "$model_dir" --output_dir "$work_dir/checkpoint" --max_draft_len 3

# An engine folder. Windows and dtypes may still be changed here.
trtllm-replayssm build --checkpoint_dir "$work_dir/checkpoint" --output_dir "$work_dir/engine" \
    --max_batch_size 4 --max_seq_len 512

# One prompt, streamed to the terminal.
trtllm-replayssm generate --engine_dir "$work_dir/engine" --input_text "$prompt" --max_output_len 32

# Many prompts from a file, with seeds and stop strings; one JSON row for each, in the same order.
printf '{"prompt": "%s"}\n{"input_ids": [5, 6, 7]}\n' "$prompt" > "$work_dir/prompts.jsonl"
trtllm-replayssm generate --engine_dir "$work_dir/engine" --input_file "$work_dir/prompts.jsonl" \
    --max_output_len 16 --temperature 0.8 --top_p 0.95 --random_seed 1 --output_file "$work_dir/outputs.jsonl"
cat "$work_dir/outputs.jsonl"
