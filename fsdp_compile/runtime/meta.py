"""Models on the meta device, which are traced for a device without its memory.

Private, as of torch 2.11 to 2.15: `FakeTensorMode`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ConfigError


def check_traced_on(device: str | torch.device, model: nn.Module, inputs: Any) -> None:
    """Raise ConfigError unless a model with these inputs can be traced for this device; the CPU takes any."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError, ValueError, OverflowError):
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"device is 'cpu' or 'cuda', not {device!r}")
    if kind == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda' traces as on a GPU, and this process has none: `fsdp-compile emulate SCRIPT` runs a script "
            "in a process that emulates one"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_meta:
            raise ConfigError(f"device='cuda' is for models on the meta device, and {name} is on {tensor.device}")
    for tensor in filter(torch.is_tensor, tree_leaves(inputs)):
        if not tensor.is_meta:
            raise ConfigError(f"device='cuda' is for inputs on the meta device, and one is on {tensor.device}")


def untouched(device: str | torch.device) -> AbstractContextManager[Any]:
    """Inside, tensors that are made on this device have no memory; those on the CPU have, which is not touched."""
    return nullcontext() if torch.device(device).type == "cpu" else FakeTensorMode(allow_non_fake_inputs=True)


def off_meta(tree: Any, device: str | torch.device = "cpu") -> Any:
    """`tree` with every tensor on the meta device replaced by an uninitialised one on `device`."""

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(data, tensor.requires_grad)
        vars(data).update(vars(tensor))  # which dimensions are marked as dynamic, among others
        return data.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, replace, tree)
