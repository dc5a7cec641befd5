"""Views: which part of a shard, or of a tensor laid out like one, belongs to which parameter on this rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ..layout.buckets import Layout, Slot
from ..passes.padding import shard_rows
from .groups import mesh_of_both


def shard_placements(mesh: DeviceMesh, layout: Layout, slot: Slot) -> list[Placement]:
    """Shard over the last mesh axis; replicated over the first of two, and everywhere for 0-d parameters."""
    last: Placement = Replicate() if layout.shards.size == 1 else Shard(slot.dim)
    return [*[Replicate() for _ in range(mesh.ndim - 1)], last]


def sharded_as(slot: Slot, local: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """The DTensor that the user sees, around this rank's part: on the mesh, and on the one of its distribution."""
    placements = shard_placements(mesh, layout, slot)
    if (distribution := slot.distribution) is None:
        return sharded_tensor(local, mesh, placements, slot.shape)
    if placements[-1].is_shard() and (parts := distribution.num_parts(slot.dim)) > 1:
        placements[-1] = _StridedShard(slot.dim, split_factor=parts)  # first into those parts, and each over the mesh
    both = mesh_of_both(mesh, distribution.mesh)
    return sharded_tensor(local, both, [*placements, *distribution.placements], distribution.shape)


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part, without autograd (`DTensor.to_local` costs an autograd node; private as of 2.11 to 2.15)."""
    local: torch.Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    return local


def laid_out_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is sharded as the parameter is; of a plain parameter, the tensor itself."""
    if not isinstance(parameter, DTensor):
        return local
    return sharded_tensor(local, parameter.device_mesh, parameter.placements, parameter.shape)


def sharded_tensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """A DTensor around this rank's part as it is.

    `DTensor.from_local` would move what is offloaded to the mesh's device. Specs are private, as of torch 2.11 to 2.15.
    """
    strides = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)


def without_offset(tensor: DTensor) -> DTensor:
    """The same DTensor around the same memory, which can be saved and copied wherever in a shard that begins.

    torch.save and copy.deepcopy ask a DTensor for its address, and fail if it reports an offset into its storage (torch
    2.13: "invalid python storage"); it reports the one that its local tensor had when it was made.
    """
    local = local_tensor(tensor)
    if local.storage_offset() == 0:
        return tensor
    alias = DTensor(local.as_strided(local.size(), local.stride(), 0), tensor._spec, requires_grad=False)
    alias._local_tensor = local
    return alias


Places: TypeAlias = "list[tuple[tuple[int, ...], tuple[int, ...], int]]"
"""Shape, strides and offset of each parameter's part in a shard."""


def places_of(layout: Layout, mesh: DeviceMesh) -> Places:
    """Where the part of each parameter is that belongs to this rank."""
    size, rank = layout.shards.size, shard_rank(layout, mesh)
    return [_place(slot, size, rank) for slot in layout.slots]


def _place(slot: Slot, size: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape = list(slot.shape)
    if size > 1:
        _, shape[slot.dim] = _section(slot.shape[slot.dim], size, rank)
    return tuple(shape), torch.empty(shape, device="meta").stride(), slot.offset


def views_at(flat: torch.Tensor, places: Places) -> list[torch.Tensor]:
    """The part of each parameter, as views into a tensor laid out as the shard."""
    begin = flat.storage_offset()
    return [flat.as_strided(shape, strides, begin + offset) for shape, strides, offset in places]


def local_views(flat: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The part of each parameter that belongs to this rank, as views into a tensor laid out as the shard."""
    return views_at(flat, places_of(layout, mesh))


def made_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """`DTensor(local, spec, requires_grad=False)` without its `__init__`, which does nothing, and not at once."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def _section(length: int, size: int, rank: int) -> tuple[int, int]:
    """Where the part of a rank begins along a dimension of this length, and how long it is."""
    most = shard_rows([length], size)
    begin = min(rank * most, length)
    return begin, min(most, length - begin)


def part_of_rank(full: torch.Tensor, dim: int, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The part of a full tensor, sharded on `dim`, that belongs to this rank, as a view."""
    if layout.shards.size == 1:
        return full
    return full.narrow(dim, *_section(full.shape[dim], layout.shards.size, shard_rank(layout, mesh)))


def shard_rank(layout: Layout, mesh: DeviceMesh) -> int:
    return 0 if layout.shards.size == 1 else mesh.get_local_rank(mesh.ndim - 1)
