"""Placements: which dimension of every parameter the ranks share, and which ranks those are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ..errors import ConfigError
from .unit_meshes import OwnMesh


def find_placements(
    parameters: Mapping[str, nn.Parameter], shard_placement_fn: Callable[[nn.Parameter], Any] | None
) -> tuple[dict[str, int], dict[str, OwnMesh]]:
    """The dimension on which each parameter is sharded, by name, and the meshes of those that have one of their own.

    Without a function, none is listed.

    Raises:
        ConfigError: what the function returns for a parameter is no placement of that parameter.
    """
    dims: dict[str, int] = {}
    meshes: dict[str, OwnMesh] = {}
    if shard_placement_fn is None:
        return dims, meshes
    for name, parameter in parameters.items():
        placement = shard_placement_fn(parameter)
        if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult
            meshes[name] = OwnMesh(_mesh(name, placement.mesh_info), has_mean_of_model=False)
            placement = placement.placement
        dims[name] = _dim(name, parameter, placement)
    return dims, meshes


def _mesh(name: str, info: Any) -> DeviceMesh:
    """That of torch's FSDPMeshInfo or HSDPMeshInfo, which is sharded over its last dimension."""
    mesh = getattr(info, "mesh", None)
    if not isinstance(mesh, DeviceMesh) or getattr(info, "shard_mesh_dim", None) != mesh.ndim - 1:
        raise ConfigError(
            f"shard_placement_fn returned the mesh_info {info!r} for {name}: that is an FSDPMeshInfo or HSDPMeshInfo "
            "whose mesh is sharded over its last dimension"
        )
    return mesh


def _dim(name: str, parameter: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    found = f"shard_placement_fn returned {placement!r} for {name}"
    if type(placement) is not Shard:  # those that other placements of torch inherit from it mean something else
        raise ConfigError(f"{found}: it returns a Shard(dim) of torch.distributed.tensor, or None for Shard(0)")
    num_dims = parameter.dim()
    if num_dims == 0:
        raise ConfigError(f"{found}, which has no dimension to shard and is kept whole: return None for it")
    if not -num_dims <= placement.dim < num_dims:
        raise ConfigError(
            f"{found}, whose shape is {tuple(parameter.shape)}: its dimensions are 0 to {num_dims - 1}, or "
            f"{-num_dims} to -1 from the end"
        )
    return placement.dim % num_dims
