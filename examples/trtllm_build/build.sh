#!/usr/bin/env bash
# From a Hugging Face folder to an engine, with trtllm-build of tensorrt-llm 1.1 or 1.2.
set -euo pipefail
usage="usage: build.sh MODEL_DIR WORK_DIR [TP_SIZE] [MODEL_CLS_NAME]"
model_dir=${1:?$usage} work_dir=${2:?$usage} tp_size=${3:-1} model_cls=${4:-ReplaySSMForCausalLM}
if ! command -v trtllm-build >/dev/null; then
    echo "trtllm-build is not installed; trtllm-replayssm build --engine_flavour tensorrt builds the same checkpoint without it" >&2
    exit 1
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

trtllm-replayssm convert --model_dir "$model_dir" --output_dir "$work_dir/checkpoint" --dtype bfloat16 --tp_size "$tp_size"

# The file names the model classes; importing it also registers the architecture that config.json asks for.
trtllm-build --checkpoint_dir "$work_dir/checkpoint" --output_dir "$work_dir/engine" \
    --model_cls_file "${MODEL_CLS_FILE:-$here/replayssm_models.py}" --model_cls_name "$model_cls" \
    --max_batch_size 8 --max_seq_len 4096 --max_num_tokens 2048 --workers "$tp_size"
