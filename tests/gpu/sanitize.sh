#!/usr/bin/env bash
# Every kernel under compute-sanitizer: addresses, shared memory races, barriers. From the repository's root, on a GPU.
set -euo pipefail
source tests/gpu/use_checkout.sh
failed=()
for tool in memcheck racecheck synccheck; do
    echo "== $tool"
    # Torch's caching allocator would hide addresses beyond a tensor's end. cuda-python asks the driver for functions that it may
    # lack; that is no error of a kernel, and launches that fail raise one anyway.
    no_cache=()
    [ "$tool" = memcheck ] && no_cache=(PYTORCH_NO_CUDA_MEMORY_CACHING=1)
    env "${no_cache[@]}" compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 \
        python3 -P tests/gpu/sanitize.py "$tool" || failed+=("$tool")
done
if ((${#failed[@]})); then
    echo "errors under: ${failed[*]}"
    exit 1
fi
echo "no errors"
