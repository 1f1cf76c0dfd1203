#!/usr/bin/env bash
# Trains the three models and measures what the precision of their states costs, all three at once on one GPU, from a checkout
# that need not be installed.
#
# Usage: run_all.sh OUTPUT               trains into OUTPUT/NAME, writes OUTPUT/accuracy/NAME.{json,md,png}, OUTPUT/NAME.log
#        run_all.sh OUTPUT MODELS        trains nothing: the models and held_out.txt are those in MODELS
#
# Environment: PYTHON (python3); NAMES ("mamba2 gated_delta kda"); TRAIN_ARGS and ACCURACY_ARGS, options for
# train.py and benchmarks.accuracy; DTYPE, of the activations when accuracy is measured (float32).
set -euo pipefail

[ $# -eq 1 ] || [ $# -eq 2 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
mkdir -p "$1"
output=$(cd "$1" && pwd) models=$(cd "${2:-$1}" && pwd) train=$(($# == 1))
python=$(command -v "${PYTHON:-python3}") || { echo "error: there is no ${PYTHON:-python3}" >&2; exit 1; }
[[ $python = /* ]] || python=$PWD/$python
cd "$(dirname "$0")/../.."
checkout=$PWD
source tests/gpu/use_checkout.sh
# Python looks in the current folder first, and the checkout itself would hide the package made of its folders.
cd "$site"
checkpoints=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; cd /; rm -rf "$site" "$checkpoints"' EXIT
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}

all_of() {
    if ((train)); then
        "$python" "$checkout/examples/train_tiny/train.py" "$1" --output_dir "$output" ${TRAIN_ARGS:-}
    fi
    "$python" -m trtllm_replayssm convert --model_dir "$models/$1" --output_dir "$checkpoints/$1" \
        --dtype "${DTYPE:-float32}"
    "$python" -m benchmarks.accuracy --checkpoint_dir "$checkpoints/$1" --text "$models/held_out.txt" \
        --output "$output/accuracy" ${ACCURACY_ARGS:-}
}

names=(${NAMES:-mamba2 gated_delta kda}) processes=() failed=0
for name in "${names[@]}"; do
    (set -e; all_of "$name") >"$output/$name.log" 2>&1 &
    processes+=($!)
done
for i in "${!names[@]}"; do
    wait "${processes[i]}" || { failed=1; echo "${names[i]} failed:"; }
    tail -n 12 "$output/${names[i]}.log"
done
exit $failed
