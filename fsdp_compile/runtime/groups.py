"""Process groups and meshes: over which ranks a model is sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from ..errors import ConfigError
from ..layout.buckets import NO_AXIS, Axes, Axis
from ..passes.metadata import Part
from .gloo import name_of_original, overlapping_group
from .ranks import all_ranks

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)

_OF_MODELS = ("tp", "pp")
"""Names that meshes give to dimensions along which ranks hold different parts of a model, on the same rows."""


def device_of(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    """The device of the parameters (the first's, of several of a type); without any, the CPU.

    Raises:
        ConfigError: the parameters live on several types of devices.
    """
    first_of_type: dict[str, tuple[str, torch.device]] = {}
    for name, parameter in parameters.items():
        first_of_type.setdefault(parameter.device.type, (name, parameter.device))
    if len(first_of_type) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in first_of_type.values())
        raise ConfigError(f"all parameters must be on one type of device, found {found}")
    return next(iter(first_of_type.values()))[1] if first_of_type else torch.device("cpu")


def device_to_shard_on(device: torch.device, mesh: object, process_group: object) -> torch.device:
    """Where parameters on `device` are sharded: those in the CPU's memory on the GPU of this rank, if the mesh, or all
    that the process groups serve, is GPUs.
    """
    if device.type != "cpu" or not dist.is_initialized():
        return device
    if isinstance(mesh, DeviceMesh):
        kinds = {mesh.device_type}
    else:
        groups = [group for group in _listed(process_group) if isinstance(group, dist.ProcessGroup)]
        kinds = {kind for group in groups for kind in _served(group)}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or kinds != {accelerator.type}:
        return device
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def resolve_mesh(
    mesh: object,
    process_group: object,
    device: torch.device,
    strategy: ShardingStrategy,
    *,
    is_offloaded: bool = False,
    local_world_size: int | None = None,
) -> DeviceMesh | None:
    """The mesh to shard over; None for a single rank.

    It is `mesh`, or one over `process_group`, or one over all ranks: for hybrid strategies (nodes, ranks of a node),
    with `local_world_size` ranks on a node.

    Raises:
        ConfigError: both are given, a mesh has more than two dimensions or not the two of a hybrid strategy, or no
            backend serves the device.
    """
    _check_arguments(mesh, process_group, strategy)
    if mesh is None and not dist.is_initialized():
        return None
    resolved = mesh if isinstance(mesh, DeviceMesh) else None
    mesh_type = resolved.device_type if resolved and is_offloaded else _mesh_device_type(device)
    for group in resolved.get_all_groups() if resolved else _listed(process_group):
        _check_backend(group, device if mesh_type == device.type else torch.device(mesh_type))
    if resolved is not None and resolved.device_type != mesh_type:
        raise ConfigError(f"the mesh is for {resolved.device_type}, the model is on {device}")
    if isinstance(process_group, dist.ProcessGroup):
        resolved = DeviceMesh.from_group(process_group, mesh_type, mesh_dim_names=("shard",))
    elif process_group is not None:
        resolved = _mesh_of_pair(_listed(process_group), mesh_type)
    elif resolved is None and strategy in _HYBRID:
        nodes = torch.arange(dist.get_world_size()).view(_nodes_and_ranks(local_world_size))
        resolved = mesh_over(nodes.tolist(), mesh_type, ("replicate", "shard"))
    elif resolved is None:
        resolved = init_device_mesh(mesh_type, (dist.get_world_size(),))
    return resolved if resolved.size() > 1 else None


def _check_arguments(mesh: object, process_group: object, strategy: ShardingStrategy) -> None:
    if mesh is not None and process_group is not None:
        raise ConfigError("give a mesh or a process_group, not both")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh is a DeviceMesh, not {type(mesh).__name__}")
    if isinstance(mesh, DeviceMesh):
        check_mesh(mesh, strategy)
    groups = [] if process_group is None else _listed(process_group)
    if (isinstance(process_group, (tuple, list)) and len(groups) != 2) or not all(
        isinstance(group, dist.ProcessGroup) for group in groups
    ):
        raise ConfigError("process_group is a ProcessGroup, or a pair of them (shard, replicate)")
    if process_group is not None and len(groups) != 2:
        _check_strategy(strategy)


def _check_strategy(strategy: ShardingStrategy) -> None:
    """Of a mesh or a group with one dimension."""
    if strategy in _HYBRID:
        raise ConfigError(
            f"{strategy.name} needs a mesh of two dimensions (replicate, shard) or a pair of process groups"
        )


def check_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> None:
    """Raise ConfigError for a mesh that nothing is sharded over, or not by this strategy."""
    if mesh.ndim == 1:
        _check_strategy(strategy)
    if mesh.ndim > 2:
        raise ConfigError(f"mesh has {mesh.ndim} dimensions; one (shard) or two (replicate, shard) are supported")
    for name in mesh.mesh_dim_names or ():
        if name in _OF_MODELS:
            raise ConfigError(
                f"mesh has the dimensions {mesh.mesh_dim_names}, of which {name!r} is for ranks that split a model: "
                "parameters are sharded over ranks with rows of their own; give the part of the mesh for those, as in "
                "mesh['dp']"
            )


def mesh_of_both(mesh: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The dimensions of `mesh` and then those of `inner`, over which parameters were distributed before.

    Raises:
        ConfigError: they are not dimensions, with names, of one mesh.
    """
    try:
        return concatenated([mesh, inner])
    except (RuntimeError, AssertionError, TypeError) as e:
        raise ConfigError(
            f"the model has parameters that are distributed over {inner}, and is to be sharded over {mesh}: both have "
            'to be dimensions, with names, of one mesh, as root["dp"] and root["tp"] are of root = '
            'init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp"))'
        ) from e


def concatenated(meshes: list[DeviceMesh]) -> DeviceMesh:
    """The dimensions of these meshes, one after another; private as of torch 2.11 to 2.15."""
    return DeviceMesh._concatenate(meshes)


def flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """These dimensions of a mesh as a single one; private as of torch 2.11 to 2.15."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def mesh_beside(inner: DeviceMesh | None) -> DeviceMesh | None:
    """The other dimension of the mesh that `inner`, over which parameters were distributed, is a dimension of.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if inner is None:
        return None
    root = inner._get_root_mesh()  # private as of torch 2.11 to 2.15
    others = [name for name in root.mesh_dim_names or () if name not in (inner.mesh_dim_names or ())]
    if len(others) != 1:
        raise ConfigError(
            f"the model has parameters that are distributed over {inner}, of {root}: say which dimensions of that it "
            'is to be sharded over, as in mesh=root["dp"]'
        )
    return root[others[0]]


def _listed(process_group: Any) -> list[Any]:
    if process_group is None:
        return [dist.group.WORLD]
    return list(process_group) if isinstance(process_group, (tuple, list)) else [process_group]


def _mesh_of_pair(groups: list[dist.ProcessGroup], mesh_type: str) -> DeviceMesh:
    shards, replicas = groups
    rows: list[Any] = [None] * dist.get_world_size(replicas)
    dist.all_gather_object(rows, dist.get_process_group_ranks(shards), group=replicas)
    names = ("replicate", "shard")
    return DeviceMesh.from_group([replicas, shards], mesh_type, torch.tensor(rows), mesh_dim_names=names)


def _nodes_and_ranks(local_world_size: int | None) -> tuple[int, int]:
    world_size = dist.get_world_size()
    if local_world_size is None or world_size % local_world_size:
        raise ConfigError(
            f"a hybrid strategy needs to know the ranks of a node (LOCAL_WORLD_SIZE is {local_world_size}, "
            f"of {world_size} ranks): "
            "give a mesh (replicate, shard)"
        )
    return world_size // local_world_size, local_world_size


def part_of(mesh: DeviceMesh, size: int) -> Part:
    """This rank's place in a group of `size` neighbouring ranks on the shard axis; every rank of the mesh calls it."""
    ranks = _ranks_of_axis(mesh, mesh.ndim - 1)
    index = mesh.get_local_rank(mesh.ndim - 1)
    begin = index - index % size
    group = _group_of(ranks[begin : begin + size])
    return Part(size, _name(group, mesh), index - begin)


def _mesh_device_type(device: torch.device) -> str:
    if device.type != "meta":
        return device.type
    return "cuda" if torch.cuda.is_available() and backend_of(None, "cuda") not in ("", "gloo") else "cpu"


def _check_backend(group: Any, device: torch.device) -> None:
    if device.type == "meta":
        return
    served = _served(group)
    if device.type not in served:
        raise ConfigError(
            f"the model is on {device}, but its process group ({dist.get_backend_config(group)}) serves {served} only: "
            "move the model, or initialise the process group with a backend for its device"
        )


def _served(group: Any) -> list[str]:
    return [str(found.type) for found in group._device_types]  # private as of torch 2.11 to 2.15


def mesh_over(ranks: list[Any], device_type: str, dim_names: tuple[str, ...] | None) -> DeviceMesh:
    """The mesh over these ranks, nested as its dimensions are; called by all of them at the same time."""
    mesh = torch.tensor(ranks, dtype=torch.int)
    if mesh.flatten().tolist() == list(range(dist.get_world_size())):  # chooses a GPU where the rank has not
        everyone = init_device_mesh(device_type, (mesh.numel(),), mesh_dim_names=dim_names if mesh.ndim == 1 else None)
        if mesh.ndim == 1:
            return everyone
    coordinate = (mesh == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for dim in range(mesh.ndim):  # each group is made by its own ranks: others may load something else
        row = mesh[(*coordinate[:dim], slice(None), *coordinate[dim + 1 :])]
        groups.append(_group_of(row.tolist()))
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=dim_names)
    names = dim_names or ("replicate", "shard")
    return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=names)


def _group_of(ranks: list[int]) -> dist.ProcessGroup:
    """The group of these ranks; they alone call this, all of them at the same time.

    `dist.new_group` does that too, but names the group by how many groups a rank knows, and ranks that know different
    numbers of them wait for each other for ever. Private, as of torch 2.11 to 2.15: what that is made of.
    """
    everyone: Any = dist.group.WORLD
    if ranks == list(range(everyone.size())):
        return everyone  # type: ignore[no-any-return]
    name: Any = "fsdp_compile/" + "_".join(map(str, ranks))
    world: Any = distributed_c10d._world
    for group, known in world.pg_names.items():
        if known == name:
            return group  # type: ignore[no-any-return]
    backend, store = world.pg_map[everyone]
    timeout = distributed_c10d._get_default_timeout(backend)
    rank_in_group = {rank: index for index, rank in enumerate(ranks)}
    # With a device bound to the group of all ranks, NCCL would split that group, for which all ranks must call.
    device, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks), rank_in_group[dist.get_rank()], ranks, backend, store, name, timeout=timeout
        )
    finally:
        everyone.bound_device_id = device
    world.pg_group_ranks[group] = rank_in_group
    return group  # type: ignore[no-any-return]


def axes_of(mesh: DeviceMesh, strategy: ShardingStrategy, *, has_scalars: bool) -> Axes:
    """The axes of a mesh of one or two dimensions. The group of all its ranks is made only where something needs it."""
    axes = [_axis(mesh, dim) for dim in range(mesh.ndim)]
    is_replicated = strategy is ShardingStrategy.NO_SHARD
    everyone = _whole_mesh(mesh) if has_scalars or is_replicated else Axis(mesh.size(), "")
    if is_replicated:
        return Axes(NO_AXIS, everyone, everyone)
    return Axes(axes[-1], axes[0] if mesh.ndim == 2 else NO_AXIS, everyone)


def _whole_mesh(mesh: DeviceMesh) -> Axis:
    if mesh.ndim == 1:
        return _axis(mesh, 0)
    return Axis(mesh.size(), _name(_group_of([*all_ranks(mesh)]), mesh))


def _axis(mesh: DeviceMesh, dim: int) -> Axis:
    return NO_AXIS if mesh.size(dim) == 1 else Axis(mesh.size(dim), _name(mesh.get_group(dim), mesh))


def _name(group: dist.ProcessGroup, mesh: DeviceMesh) -> str:
    """The name under which graphs find a group."""
    return str(overlapping_group(group, mesh.device_type).group_name)


def _ranks_of_axis(mesh: DeviceMesh, axis: int) -> list[int]:
    """The ranks that this one meets along an axis of a mesh, in the order of their group."""
    return dist.get_process_group_ranks(mesh.get_group(axis))


def group_over(ranks: Sequence[int], mesh: DeviceMesh) -> str:
    """The name under which these ranks find their group, which is made if there is none; all of them call this."""
    for axis in range(mesh.ndim):
        if sorted(_ranks_of_axis(mesh, axis)) == [*ranks]:
            return _name(mesh.get_group(axis), mesh)
    return _name(_group_of([*ranks]), mesh)


def ranks_of_group(name: str) -> list[int] | None:
    """The ranks of the process group that graphs find under this name; None if this process has none."""
    named = name_of_original(name)
    for group, known in distributed_c10d._world.pg_names.items():  # private as of torch 2.11 to 2.15
        if known == named:
            return dist.get_process_group_ranks(group)
    return None


def num_shards_of(mesh: DeviceMesh | None) -> int:
    """How many ranks parameters are sharded over: those of the mesh's last dimension."""
    return 1 if mesh is None else mesh.size(mesh.ndim - 1)


def backend_of(group: dist.ProcessGroup | None, device_type: str) -> str:
    """Which backend of a group (None: of all ranks) serves this type of device, as "nccl"; "" if none does.

    A group may have several: `dist.get_backend` calls those of `init_process_group()`, without a backend, "undefined".
    """
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}.get(device_type, "")


def is_nccl(mesh: DeviceMesh) -> bool:
    """Whether the gathers of a model on this mesh are NCCL's."""
    return backend_of(mesh.get_group(mesh.ndim - 1), mesh.device_type) == "nccl"
