"""Gathers of whole buckets outside of compiled graphs: every rank's chunk of each parameter, put together."""

from __future__ import annotations

import contextlib

import torch

from ..layout.buckets import Slot
from ..passes import ops
from .assembly import ASSEMBLE
from .collectives import running_alone, start_gather, wait
from .flat_shard import FlatShard


class Gathering:
    """The gather of a tensor that is laid out as a shard; it starts with the object. Every rank makes one."""

    def __init__(self, shard: FlatShard, flat: torch.Tensor, what: str) -> None:
        """`flat` is this rank's; `what` says what it is for, the same on all ranks.

        Raises:
            RuntimeError: it has no values.
        """
        layout = shard.layout
        if flat.is_meta:
            raise RuntimeError(
                f"{layout.slots[0].parameter} has no values on the meta device: call model.to_empty first"
            )
        self._shard = shard
        self._pending = flat.to(shard.mesh.device_type)
        if layout.shards.size > 1:
            with running_alone(what, shard.agreement, layout.shards.group):
                self._pending = start_gather(self._pending, layout.shards.size, layout.shards.group)

    def wait(self) -> list[torch.Tensor]:
        """The full tensors, one for each slot of the layout, on the mesh's device; views of what was gathered."""
        layout = self._shard.layout
        gathered = self._pending
        if layout.shards.size > 1:
            agreement = self._shard.agreement
            with contextlib.nullcontext() if agreement is None else agreement.running():
                gathered = wait(gathered)
        return [_full(gathered.view(layout.shards.size, -1), slot) for slot in layout.slots]


def _full(chunks_of_ranks: torch.Tensor, slot: Slot) -> torch.Tensor:
    num_ranks = len(chunks_of_ranks)
    chunks = chunks_of_ranks[:, slot.offset : slot.offset + ops.shard_numel(slot.rows, num_ranks)]
    if not slot.shape:
        return chunks.reshape(())
    num_rows, *inner = slot.rows
    rows = chunks.reshape(num_ranks * ops.shard_rows(slot.rows, num_ranks), *inner)[:num_rows]
    return ASSEMBLE(rows, slot.shape, slot.dim, num_ranks) if slot.dim else rows
