"""`tensor.data = other` of a DTensor: torch (2.11 to 2.15) loses it without a word, and this rank's part stays.

Once a model is sharded, `other` takes the place of the data, as for a plain tensor, in every DTensor of the process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

_DATA: Any = vars(torch._C.TensorBase)["data"]


def keep_assigned_data() -> None:
    """Have DTensors keep what is assigned to their `.data`."""
    if "data" not in vars(DTensor):
        DTensor.data = property(_DATA.__get__, _assign)  # type: ignore[assignment]


def _assign(self: DTensor, other: torch.Tensor) -> None:
    """Raise TypeError unless `other` is a DTensor of the same mesh and placements; nothing has changed then."""
    if not isinstance(other, DTensor):
        raise TypeError(
            f"a plain tensor was assigned to the .data of a DTensor of shape {tuple(self.shape)}, which is sharded: "
            "assign a DTensor, or write into the full parameter inside model.summon_full_params()"
        )
    if (other.device_mesh, other.placements) != (self.device_mesh, self.placements):
        raise TypeError(
            f"a DTensor with the placements {other.placements} was assigned to the .data of one with "
            f"{self.placements}: redistribute it first"
        )
    _DATA.__set__(self, other)
    self._local_tensor = other._local_tensor.detach()
    self._spec = other._spec
