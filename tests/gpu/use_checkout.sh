# Makes `import trtllm_replayssm` find this checkout without installing it: source it from the repository's root.
site=$(mktemp -d)
mkdir "$site/trtllm_replayssm"
ln -s "$PWD"/trtllm_replayssm/* "$PWD/plugins" "$PWD/builders" "$site/trtllm_replayssm/"
ln -s "$PWD/benchmarks" "$site/"
export PYTHONPATH="$site:$PWD/tests/gpu${PYTHONPATH:+:$PYTHONPATH}"
