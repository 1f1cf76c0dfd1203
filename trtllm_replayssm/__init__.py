"""ReplaySSM for TensorRT-LLM: hybrid SSM / attention checkpoints as engines whose recurrent layers are plugin layers."""

__version__ = "0.1.0"
