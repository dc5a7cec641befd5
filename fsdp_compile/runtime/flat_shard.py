"""Flat shards: the storage of a bucket on this rank, and the DTensor parameters that are views into it."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..errors import ConfigError
from ..layout import Layout, Slot


@dataclasses.dataclass(eq=False)
class FlatShard:
    """This rank's shard of one bucket.

    Attributes:
        data: the 1-D leaf that compiled graphs take; its gradient is handed over to `parameters` and then cleared.
        parameters: the DTensor parameters that the user sees, one for each slot of the layout, views into `data`.
        owners: for each of them a module that holds it, and its name there.
        received: offsets of the parameters that the running backward has a gradient for.
    """

    layout: Layout
    data: nn.Parameter
    parameters: list[nn.Parameter]
    owners: list[tuple[nn.Module, str]]
    received: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def create(
        cls, layout: Layout, originals: list[torch.Tensor], owners: list[tuple[nn.Module, str]], mesh: DeviceMesh
    ) -> FlatShard:
        """Shard `originals`, one full tensor for each slot."""
        flat = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        placements = shard_placements(mesh, layout)
        parameters = []
        for slot, original in zip(layout.slots, originals, strict=True):
            view = local_view(flat, layout, slot, mesh)
            first_row = _rank(layout, mesh) * _rows(layout, slot)
            view.copy_(original if not slot.shape else original[first_row : first_row + view.shape[0]])
            stride = torch.empty(slot.shape, device="meta").stride()
            sharded = DTensor.from_local(
                view, mesh, placements, run_check=False, shape=torch.Size(slot.shape), stride=stride
            )
            parameters.append(nn.Parameter(sharded, requires_grad=layout.requires_grad))
        shard = cls(layout, nn.Parameter(flat, requires_grad=layout.requires_grad), parameters, owners)
        shard.data.fsdp_flat_shard = shard  # type: ignore[attr-defined]  # how the backend knows its inputs
        return shard

    def check_views(self, mesh: DeviceMesh) -> None:
        """Before a forward, see that every parameter is a view into the shard; take over values moved elsewhere.

        `to_empty`, `.to(dtype)` or `load_state_dict(assign=True)` give the parameters storage of their own.

        Raises:
            ConfigError: a parameter was replaced by something that cannot take its place in the shard.
        """
        self.received.clear()  # what a backward noted that ended in an exception
        self.parameters = [self._current(index) for index in range(len(self.parameters))]
        if all(
            self._is_view(slot, parameter) for slot, parameter in zip(self.layout.slots, self.parameters, strict=True)
        ):
            return
        locals_ = [local_tensor(parameter) for parameter in self.parameters]
        kinds = {(local.dtype, local.device) for local in locals_}
        if len(kinds) > 1:
            raise ConfigError(
                f"the parameters of {self.layout.bucket}, sharded together, now differ in dtype or device: {kinds}"
            )
        dtype, device = kinds.pop()
        with torch.no_grad():
            flat = torch.zeros(self.layout.numel, dtype=dtype, device=device)
            for slot, parameter, local in zip(self.layout.slots, self.parameters, locals_, strict=True):
                view = local_view(flat, self.layout, slot, mesh)
                view.copy_(local)
                parameter._local_tensor = view  # type: ignore[attr-defined]
            self.data.data = flat

    def _current(self, index: int) -> nn.Parameter:
        """The parameter that the model holds now in place of `parameters[index]`."""
        (module, name), slot = self.owners[index], self.layout.slots[index]
        found, known = module._parameters.get(name), self.parameters[index]
        if not isinstance(found, DTensor) or found.shape != known.shape or found.placements != known.placements:
            raise ConfigError(
                f"{slot.parameter} was sharded as a DTensor of shape {tuple(slot.shape)} and is now "
                f"{type(found).__name__}: assign a DTensor of the same shape and placements, or shard a new model"
            )
        if found.requires_grad and not self.layout.requires_grad:
            raise ConfigError(f"{slot.parameter} was frozen when it was sharded: unfreeze it before sharding the model")
        return found

    def _is_view(self, slot: Slot, parameter: nn.Parameter) -> bool:
        local, data = local_tensor(parameter), self.data
        if local.dtype != data.dtype or local.device != data.device:
            return False
        begin = data.data_ptr() + slot.offset * data.element_size()
        return local.is_meta or local.numel() == 0 or local.data_ptr() == begin


def shard_placements(mesh: DeviceMesh, layout: Layout) -> list[Placement]:
    """Shard(0) over the last mesh axis; replicated over the first of two, and everywhere for 0-d parameters."""
    last: Placement = Replicate() if layout.shards.size == 1 else Shard(0)
    return [*[Replicate() for _ in range(mesh.ndim - 1)], last]


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part, without autograd (`DTensor.to_local` costs an autograd node; private as of 2.11 to 2.13)."""
    local: torch.Tensor = parameter._local_tensor  # type: ignore[attr-defined]
    return local


def local_view(flat: torch.Tensor, layout: Layout, slot: Slot, mesh: DeviceMesh) -> torch.Tensor:
    """The rows of a parameter that belong to this rank, as a view into a tensor laid out as the shard."""
    if layout.shards.size == 1:
        return flat[slot.offset : slot.offset + torch.Size(slot.shape).numel()].view(slot.shape)
    rows = _rows(layout, slot)
    num_local = max(0, min(rows, slot.shape[0] - _rank(layout, mesh) * rows))
    inner = slot.shape[1:]
    numel = num_local * torch.Size(inner).numel()
    return flat[slot.offset : slot.offset + numel].view(num_local, *inner)


def _rank(layout: Layout, mesh: DeviceMesh) -> int:
    return 0 if layout.shards.size == 1 else mesh.get_local_rank(mesh.ndim - 1)


def _rows(layout: Layout, slot: Slot) -> int:
    return -(-slot.shape[0] // layout.shards.size) if slot.shape else 1
