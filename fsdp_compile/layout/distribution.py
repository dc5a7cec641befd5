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
        of_data: dimensions of the mesh over which gradients are left as sums in parts, for sharding to add up.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    strides: tuple[int, ...]
    of_data: frozenset[str] = frozenset()

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
        """Whether every placement is one that a parameter may have: Shard, strided or not, or Replicate."""
        return all(type(each) in (Shard, Replicate) or _is_strided(each) for each in self.placements)

    def is_strided(self, dim: int) -> bool:
        """Whether the part of a rank consists of several pieces along one of the tensor's dimensions.

        transformers splits so what is fused: of a gate and a projection in one parameter, each rank has a part of both.
        """
        strided: list[Any] = [placement for placement in self.placements if _is_strided(placement)]
        return any(placement.dim % len(self.shape) == dim for placement in strided)

    def num_parts(self, dim: int) -> int:
        """How many parts the tensor has along one of its dimensions."""
        sizes = zip(self.placements, self.mesh.shape, strict=True)
        return math.prod(size for placement, size in sizes if placement.is_shard(dim))

    def around(self, local: torch.Tensor) -> DTensor:
        """The DTensor of which this rank holds `local`."""
        gradient = None
        if self.of_data:
            dims = zip(self.mesh.mesh_dim_names or (), self.placements, strict=True)
            gradient = [Partial() if name in self.of_data else placement for name, placement in dims]
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.strides,
            grad_placements=gradient,
        )

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a full tensor, which every rank has."""
        return local_part(distribute_tensor(full, self.mesh, self.placements, src_data_rank=None))


@dataclasses.dataclass(frozen=True)
class SummedOver:
    """That of a parameter that every rank of a mesh has whole, and computes other parts of the gradient of."""

    mesh: DeviceMesh

    def __deepcopy__(self, memo: dict[int, Any]) -> SummedOver:
        """Process groups are shared by copies."""
        return self

    def around(self, full: torch.Tensor) -> torch.Tensor:
        """The same tensor, whose gradient is the sum of those of all ranks."""
        whole = DTensor.from_local(full, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def local(self, full: torch.Tensor) -> torch.Tensor:
        """All of a full tensor is each rank's part."""
        return full.detach()


def _is_strided(placement: Any) -> bool:
    """Whether this is a `_StridedShard`, whose name is private, as of torch 2.11 to 2.15."""
    return isinstance(placement, Placement) and hasattr(placement, "split_factor")


_READ_AS = "_fsdp_read_as"


def read_as(parameter: nn.Parameter) -> Distribution | None:
    """What a forward reads instead of the parameter, if `on_other_dims` made that."""
    return getattr(parameter, _READ_AS, None)


def on_other_dims(name: str, parameter: nn.Parameter, mesh: DeviceMesh, of_data: Collection[str]) -> nn.Parameter:
    """A parameter that is a DTensor on `mesh` as one on its dimensions that are not for data, with the same memory.

    Where there are no others, it is a plain tensor. A forward still reads what it was.

    Args:
        of_data: the names of the dimensions over which it is replicated.

    Raises:
        ConfigError: it is not, or is on another mesh.
    """
    whole = Distribution.of(parameter)
    assert whole is not None
    if whole.mesh != mesh:
        raise ConfigError(f"dp_mesh_dims: {name} is a DTensor on {whole.mesh}, and mesh is {mesh}")
    placement_over = dict(zip(mesh.mesh_dim_names or (), whole.placements, strict=True))
    for dim in of_data:
        if not placement_over[dim].is_replicate():
            raise ConfigError(
                f"dp_mesh_dims: {name} has the placement {placement_over[dim]} over {dim!r}, not Replicate()"
            )
    local, others = local_part(parameter), tuple(dim for dim in placement_over if dim not in of_data)
    if others:
        kept = tuple(placement_over[dim] for dim in others)
        local = Distribution(mesh[others], kept, whole.shape, whole.strides).around(local)
    split = nn.Parameter(local, requires_grad=parameter.requires_grad)
    setattr(split, _READ_AS, dataclasses.replace(whole, of_data=frozenset(of_data)))
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
