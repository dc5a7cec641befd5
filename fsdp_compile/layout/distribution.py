"""Distribution: how a parameter was spread over ranks before it is sharded, by tensor or expert parallelism.

Such a parameter is a DTensor on a mesh of its own, and every rank shards the part that it holds. A forward reads that
part as a DTensor on that mesh again, so what the other parallelism made of the model still holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A DTensor without its values.

    Attributes:
        mesh, placements: of the DTensor.
        shape, strides: of all of it.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    strides: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribution:
        """Process groups are shared by copies."""
        return self

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Distribution | None:
        """That of a DTensor; None of a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())

    @property
    def is_plain(self) -> bool:
        """Whether every placement is one that a parameter may have: Shard or Replicate."""
        return all(type(placement) in (Shard, Replicate) for placement in self.placements)

    def num_parts(self, dim: int) -> int:
        """How many parts the tensor has along one of its dimensions."""
        sizes = zip(self.placements, self.mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if placement.is_shard(dim))

    def around(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank holds `local`."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.strides
        )

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor, which every rank has."""
        return local_part(distribute_tensor(full, self.mesh, self.placements, src_data_rank=None))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, without autograd: of one that is not distributed, all of it."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def distribution_mesh(parameters: Mapping[str, nn.Parameter]) -> DeviceMesh | None:
    """The mesh that those of the parameters are on which are distributed; None if none is.

    Raises:
        ConfigError: they are on several, or one is neither sharded nor replicated.
    """
    found: tuple[str, DeviceMesh] | None = None
    for name, parameter in parameters.items():
        if (distribution := Distribution.of(parameter)) is None:
            continue
        if not distribution.is_plain:
            raise ConfigError(
                f"{name} is a DTensor with the placements {distribution.placements}: parameters may be distributed by "
                "Shard and Replicate"
            )
        if found is not None and found[1] != distribution.mesh:
            raise ConfigError(
                f"{found[0]} is a DTensor on {found[1]}, and {name} on {distribution.mesh}: parameters may be "
                "distributed over one mesh"
            )
        found = found or (name, distribution.mesh)
    return None if found is None else found[1]
