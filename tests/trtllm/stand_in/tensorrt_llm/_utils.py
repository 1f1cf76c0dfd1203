"""dtypes by their names, and numpy arrays that hold bfloat16."""

import numpy as np
import torch

from tensorrt_llm.trt import trt

np_bfloat16 = np.dtype("V2", metadata={"dtype": "bfloat16"})
NUMPY = {
    np.dtype("float32"): "float32",
    np.dtype("float16"): "float16",
    np_bfloat16: "bfloat16",
}


def torch_to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np_bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def numpy_to_torch(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == np_bfloat16 else torch.from_numpy(x)


def str_dtype_to_trt(dtype: str):
    return getattr(trt, dtype)
