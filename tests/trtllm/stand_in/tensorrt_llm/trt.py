"""The TensorRT that stands behind the stand-in; the real package imports ``tensorrt`` itself."""

from trtllm_replayssm.compat import load_tensorrt

TENSORRT = load_tensorrt(("tensorrt_rtx",))
trt = TENSORRT.module
#: Of the engines: TensorRT-RTX builds for it without a GPU.
CAPABILITY = (8, 9)
