"""Shapes: what symbolic sizes were when they were traced. Private torch API, as of 2.11 to 2.13: `SymNode.hint`."""

from __future__ import annotations

import torch

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

_UNKNOWN = 8192  # what Inductor takes for sizes that depend on data


def hint(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool:
    """The value that was traced with; for one that depends on data, 8192. Adds no guard, unlike int()."""
    found: int | float | bool | None = value.node.hint
    return found if found is not None else value.node.pytype(_UNKNOWN)
