"""`dp_mesh_dims`: a mesh some of whose dimensions are for data, and parameters that are DTensors on all of it.

Each becomes a DTensor on the other dimensions, replicated as it is over those for data, and remembers what a forward
reads it as.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..layout.distribution import on_other_dims
from ..module.adoption import adopted_parameters, sharded_parts
from ..runtime.groups import concatenated, flattened


@contextmanager
def on_data_dims(
    module: nn.Module, mesh: DeviceMesh | None, dims: Any, ignored: Collection[object]
) -> Iterator[DeviceMesh | None]:
    """The mesh to shard over; inside, parameters are DTensors on the other dimensions, or were plain tensors before.

    Args:
        dims: torch's DataParallelMeshDims; None for a mesh that has no other dimensions.

    Raises:
        ConfigError: the mesh has no such dimensions, or a parameter is a DTensor that is not replicated over them.
    """
    if dims is None:
        yield mesh
        return
    if not hasattr(dims, "shard_names"):  # the class is new in torch 2.13
        raise ConfigError(f"dp_mesh_dims is torch's DataParallelMeshDims, not {type(dims).__name__}")
    shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
    _check(mesh, shard, replicate)
    assert mesh is not None
    taken = {*adopted_parameters(module, sharded_parts(module)), *ignored}
    split: dict[nn.Parameter, nn.Parameter] = {
        parameter: on_other_dims(name, parameter, mesh, {*shard, *replicate})
        for name, parameter in module.named_parameters()
        if parameter not in taken and isinstance(parameter, DTensor)
    }
    before = _replaced(module, split)
    try:
        yield (
            flattened(mesh, shard)
            if not replicate
            else concatenated([flattened(mesh, replicate), flattened(mesh, shard)])
        )
    except BaseException:
        for owner, name, parameter in before:
            owner._parameters[name] = parameter
        raise


def _check(mesh: DeviceMesh | None, shard: tuple[str, ...], replicate: tuple[str, ...]) -> None:
    names = () if mesh is None else mesh.mesh_dim_names or ()
    missing = [name for name in (*shard, *replicate) if name not in names]
    if missing:
        raise ConfigError(f"dp_mesh_dims names {missing[0]!r}, and the dimensions of mesh are {list(names)}")
    if not shard:
        raise ConfigError(
            f"dp_mesh_dims has ranks with copies only ({', '.join(replicate)}): give it dimensions to shard over, too, "
            "or take fsdp_compile with sharding_strategy=NO_SHARD"
        )


def _replaced(module: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Put the new parameters into the places of the old ones; what was where."""
    before = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and parameter in new
    ]
    for owner, name, parameter in before:
        owner._parameters[name] = new[parameter]
    return before
