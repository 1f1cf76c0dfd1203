"""What a user's ``--model_cls_file`` is, for the classes of cut_models."""

from cut_models import CutForCausalLM

__all__ = ["CutForCausalLM"]
