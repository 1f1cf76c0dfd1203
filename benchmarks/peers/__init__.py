"""Kernels of other projects, loaded from their published packages while a benchmark runs.

``fetch`` brings the few files that are needed into a folder that git ignores; ``loader`` imports them without their
frameworks; the other modules call them, one class each. Nothing of another project is in this repository.
"""

#: What has kernels of these layers and is not measured, and why.
ABSENT = {
    "FlashInfer KDA decode": "documented for compute capability 10.0 and later",
    "TensorRT-LLM": "no package for this Python on PyPI; its source package fetches from elsewhere",
    "vLLM RecoverSSM (KDA verify)": "needs metadata objects of a running vLLM",
    "SGLang helion KDA replay": "needs helion, which tunes itself for minutes a shape",
    "vLLM fork of ReplaySSM's authors": "not on PyPI",
}
