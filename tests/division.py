"""Division as a GPU's torch does it: by a Python number it is a product with the inverse, which a CPU's quotient is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

QUOTIENTS = (torch.div, torch.true_divide, Tensor.div, Tensor.div_, Tensor.true_divide, Tensor.__truediv__)


class DivisionOfGpus(TorchFunctionMode):
    """Within it, a tensor divided by a number is multiplied by the float32 inverse, on a CPU, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in QUOTIENTS and len(args) == 2 and not isinstance(args[1], Tensor):
            return args[0] * (1 / torch.tensor(args[1], dtype=torch.float32))
        return func(*args, **kwargs or {})
