"""Placements: which dimension of every parameter the ranks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn
from torch.distributed.tensor import Shard

from ..errors import ConfigError


def find_dims(
    parameters: Mapping[str, nn.Parameter], shard_placement_fn: Callable[[nn.Parameter], Any] | None
) -> dict[str, int]:
    """The dimension on which each parameter is sharded, by name; without a function, none is listed.

    Raises:
        ConfigError: what the function returns for a parameter is no placement of that parameter.
    """
    if shard_placement_fn is None:
        return {}
    return {name: _dim(name, parameter, shard_placement_fn(parameter)) for name, parameter in parameters.items()}


def _dim(name: str, parameter: nn.Parameter, placement: Any) -> int:
    if placement is None:
        return 0
    found = f"shard_placement_fn returned {placement!r} for {name}"
    if hasattr(placement, "mesh_info"):  # torch's ShardPlacementResult
        raise ConfigError(f"{found}: a mesh for a single parameter is not supported, return its Shard(dim) or None")
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
