"""Views: which part of a shard, or of a tensor laid out like one, belongs to which parameter on this rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..layout.buckets import Layout, Slot
from ..passes import ops


def shard_placements(mesh: DeviceMesh, layout: Layout) -> list[Placement]:
    """Shard(0) over the last mesh axis; replicated over the first of two, and everywhere for 0-d parameters."""
    last: Placement = Replicate() if layout.shards.size == 1 else Shard(0)
    return [*[Replicate() for _ in range(mesh.ndim - 1)], last]


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


def local_views(flat: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The rows of each parameter that belong to this rank, as views into a tensor laid out as the shard."""
    size, rank = layout.shards.size, shard_rank(layout, mesh)
    return [_rows(flat, slot, size, rank) for slot in layout.slots]


def _rows(flat: torch.Tensor, slot: Slot, size: int, rank: int) -> torch.Tensor:
    if size == 1:
        return flat.narrow(0, slot.offset, math.prod(slot.shape)).view(slot.shape)
    rows, inner = ops.shard_rows(slot.shape, size), slot.shape[1:]
    num_local = max(0, min(rows, slot.shape[0] - rank * rows))
    return flat.narrow(0, slot.offset, num_local * math.prod(inner)).view(num_local, *inner)


def rows_of_rank(full: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The rows of a full tensor that belong to this rank, as a view."""
    if layout.shards.size == 1:
        return full
    rows = ops.shard_rows(full.shape, layout.shards.size)
    return full[shard_rank(layout, mesh) * rows :][:rows]


def shard_rank(layout: Layout, mesh: DeviceMesh) -> int:
    return 0 if layout.shards.size == 1 else mesh.get_local_rank(mesh.ndim - 1)
