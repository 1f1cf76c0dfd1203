#!/usr/bin/env bash
# Several GPUs of one host, in either of two ways.
#
# Usage: multi_gpu.sh split    CHECKPOINT_TP_N ENGINE_DIR    one engine over N GPUs (convert --tp_size N), one process a GPU
#        multi_gpu.sh replicas ENGINE_DIR COUNT              COUNT servers of one GPU each, on ports 8000, 8010, 8020, ...
#
# Environment: PORT, the first port (8000); DEVICE, instead of cuda:0, cuda:1, ...
set -euo pipefail

case "${1:-}" in
split)
    checkpoint=$2 engine=$3
    trtllm-replayssm build --checkpoint_dir "$checkpoint" --output_dir "$engine" --max_batch_size 32 --max_seq_len 8192
    # One model, one set of ports: the server's model is rank 0, and starts the other ranks by itself.
    exec trtllm-replayssm serve --engine_dir "$engine"
    ;;
replicas)
    engine=$2 count=$3 port=${PORT:-8000}
    trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
    for ((gpu = 0; gpu < count; gpu++)); do
        trtllm-replayssm serve --engine_dir "$engine" --device "${DEVICE:-cuda:$gpu}" --served_model_name model \
            --http_port $((port + 10 * gpu)) --grpc_port $((port + 10 * gpu + 1)) \
            --metrics_port $((port + 10 * gpu + 2)) --openai_port $((port + 10 * gpu + 3)) &
    done
    # When one of them ends, so do the others.
    wait -n
    ;;
*)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
