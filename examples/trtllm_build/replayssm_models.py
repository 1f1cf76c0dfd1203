"""For ``trtllm-build --model_cls_file``, which runs this file; its workers find the classes where they are imported from."""

from trtllm_replayssm.trtllm.model_cls import ReplaySSMForCausalLM, ReplaySSMOwnCacheForCausalLM

__all__ = ["ReplaySSMForCausalLM", "ReplaySSMOwnCacheForCausalLM"]
