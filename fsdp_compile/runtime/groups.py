"""Process groups and meshes: over which ranks a model is sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..errors import ConfigError
from ..layout import Axis


def model_device(model: nn.Module) -> torch.device:
    """The device type of the model's parameters; without any, the CPU.

    Raises:
        ConfigError: the parameters live on several types of devices.
    """
    first_of_type: dict[str, tuple[str, torch.device]] = {}
    for name, parameter in model.named_parameters():
        first_of_type.setdefault(parameter.device.type, (name, parameter.device))
    if len(first_of_type) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in first_of_type.values())
        raise ConfigError(f"all parameters must be on one type of device, found {found}")
    return next(iter(first_of_type.values()))[1] if first_of_type else torch.device("cpu")


def resolve_mesh(mesh: object, process_group: object, device: torch.device) -> DeviceMesh | None:
    """The mesh to shard over: `mesh`, or one over `process_group`, or one over all ranks; None for a single rank.

    Raises:
        ConfigError: both are given, a mesh has more than two dimensions, or no backend serves the device.
    """
    if mesh is not None and process_group is not None:
        raise ConfigError("give a mesh or a process_group, not both")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is a DeviceMesh, not {type(mesh).__name__}")
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 2:
        raise ConfigError(f"mesh has {mesh.ndim} dimensions; one (shard) or two (replicate, shard) are supported")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError("process_group is one ProcessGroup; for hybrid sharding give a mesh (replicate, shard)")
    if mesh is None and not dist.is_initialized():
        return None
    mesh_type = _mesh_device_type(device)
    groups = mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [process_group or dist.group.WORLD]
    for group in groups:
        _check_backend(group, device)
    if isinstance(mesh, DeviceMesh):
        if mesh.device_type != mesh_type:
            raise ConfigError(f"the mesh is for {mesh.device_type}, the model is on {device}")
        resolved = mesh
    elif isinstance(process_group, dist.ProcessGroup):
        resolved = DeviceMesh.from_group(process_group, mesh_type, mesh_dim_names=("shard",))
    else:
        resolved = init_device_mesh(mesh_type, (dist.get_world_size(),), mesh_dim_names=("shard",))
    return resolved if resolved.size() > 1 else None


def _mesh_device_type(device: torch.device) -> str:
    if device.type != "meta":
        return device.type
    return "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"


def _check_backend(group: Any, device: torch.device) -> None:
    if device.type == "meta":
        return
    served = [str(found.type) for found in group._device_types]  # private as of torch 2.11 to 2.13
    if device.type not in served:
        raise ConfigError(
            f"the model is on {device}, but its process group ({dist.get_backend(group)}) serves {served} only: "
            "move the model, or initialise the process group with a backend for its device"
        )


def axes_of(mesh: DeviceMesh) -> tuple[Axis, Axis]:
    """The axes (shard, replicate) of a mesh of one or two dimensions."""
    axes = [_axis(mesh, dim) for dim in range(mesh.ndim)]
    return axes[-1], axes[0] if mesh.ndim == 2 else Axis(1, "")


def whole_mesh(mesh: DeviceMesh) -> Axis:
    """One axis of all ranks of the mesh (`DeviceMesh._flatten` is private as of torch 2.11 to 2.13)."""
    return _axis(mesh if mesh.ndim == 1 else mesh._flatten("fsdp_whole_mesh"), 0)


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    return Axis(mesh.size(dim), str(mesh.get_group(dim).group_name))


def is_nccl(mesh: DeviceMesh) -> bool:
    return "nccl" in dist.get_backend(mesh.get_group(mesh.ndim - 1))
