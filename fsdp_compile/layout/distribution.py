"""Distribution: how a parameter was spread over ranks before it is sharded, by tensor or expert parallelism.

Such a parameter is a DTensor on a mesh of its own, and every rank shards the part that it holds. A forward reads that
part as a DTensor on that mesh again, so what the other parallelism made of the model still holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A DTensor without its values.

    Attributes:
        mesh, placements: of the DTensor.
        shape, strides: of all of it.
        read_on: the mesh and the placements that a forward reads it with, where those are others: the mesh has
            dimensions for data, too, over which its gradients are sums in parts.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    strides: tuple[int, ...]
    read_on: tuple[DeviceMesh, tuple[Placement, ...]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribution:
        """Process groups are shared by copies."""
        return self

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Distribution | None:
        """That of a DTensor; None of a plain tensor."""
        if not isinstance(tensor, DTensor):
            return None
        read_on = vars(tensor).get(_READ_ON)
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride(), read_on)

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

    def read(self, local: torch.Tensor) -> DTensor:
        """The DTensor that a forward computes with, of which this rank holds `local`."""
        if self.read_on is None:
            return self.around(local)
        mesh, placements = self.read_on
        of_data = {*(mesh.mesh_dim_names or ())}.difference(self.mesh.mesh_dim_names or ())
        summed = [
            Partial() if name in of_data else placement
            for name, placement in zip(mesh.mesh_dim_names or (), placements, strict=True)
        ]
        return DTensor.from_local(
            local,
            mesh,
            placements,
            run_check=False,
            shape=self.shape,
            stride=self.strides,
            grad_placements=summed,
        )

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor, which every rank has."""
        return local_part(distribute_tensor(full, self.mesh, self.placements, src_data_rank=None))


_READ_ON = "_fsdp_read_on"


def on_other_dims(name: str, parameter: nn.Parameter, mesh: DeviceMesh, of_data: Collection[str]) -> nn.Parameter:
    """A parameter that is a DTensor on `mesh` as one on its dimensions that are not for data, with the same memory.

    Args:
        of_data: the names of the others, over which it is replicated.

    Raises:
        ConfigError: it is not, or is on another mesh, or there are no other dimensions.
    """
    assert isinstance(parameter, DTensor)
    names, placements = mesh.mesh_dim_names or (), tuple(parameter.placements)
    if parameter.device_mesh != mesh:
        raise ConfigError(f"dp_mesh_dims: {name} is a DTensor on {parameter.device_mesh}, and mesh is {mesh}")
    others = tuple(each for each in names if each not in of_data)
    if not others:
        raise ConfigError(
            f"dp_mesh_dims names all dimensions of mesh, and {name} is a DTensor on it: parameters that nothing but "
            "sharding distributes are plain tensors"
        )
    for dim, placement in zip(names, placements, strict=True):
        if dim in of_data and not placement.is_replicate():
            raise ConfigError(f"dp_mesh_dims: {name} has the placement {placement} over {dim!r}, not Replicate()")
    kept = [placement for dim, placement in zip(names, placements, strict=True) if dim in others]
    local = DTensor.from_local(
        local_part(parameter),
        mesh[others],
        kept,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    split = nn.Parameter(local, requires_grad=parameter.requires_grad)
    setattr(split, _READ_ON, (mesh, placements))
    return split


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
