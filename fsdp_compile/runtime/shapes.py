"""Shapes: what symbolic sizes are, and were when they were traced.

Private torch API, as of 2.11 to 2.15: `SymNode.hint`, `SymNode.expr`, `Tensor._has_symbolic_sizes_strides`.
"""

from __future__ import annotations

from typing import Any

import torch

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_UNKNOWN = 8192  # what Inductor takes for sizes that depend on data


def hint(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool:
    """The value that was traced with; for one that depends on data, 8192. Adds no guard, unlike int()."""
    found: int | float | bool | None = value.node.hint
    return found if found is not None else value.node.pytype(_UNKNOWN)


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Whether a size or a stride of a tensor is a symbol."""
    return tensor._has_symbolic_sizes_strides


def traced_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor when it was traced."""
    if not is_symbolic(tensor):
        return tuple(tensor.shape)
    return tuple(int(hint(size)) if isinstance(size, SYMBOLIC) else size for size in tensor.shape)


def size_expression(size: int | torch.SymInt) -> Any:
    """A size as it is, or as a sympy expression in the symbols of dynamic dimensions."""
    return size if isinstance(size, int) else size.node.expr
