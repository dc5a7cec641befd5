"""Gathering once for several calls: full parameters that outlive a backward, as micro-batches want them.

Without this, every call gathers for itself, in its graphs. Here the gathers of all parameters start before the first
of several calls; the graphs of all of them take what is gathered as inputs, wait for each parameter where it is used
first, and free nothing. It ends when gradients are reduced, so that an optimizer may step. Where one steps without
that, parameters are gathered anew.

Of a shard, calls gather once while its unit is not resharded after the forward, and gradients are kept by `no_sync`, as
FSDP1 documents it, or `set_reshard_after_backward(False)` was called. torch's pipelines call that before the first
backward of a step, behind several forwards: a step whose predecessor had it gathers once from its first forward on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..passes.padding import shard_numel
from .collectives import running_alone, start_gathers
from .flat_shard import FlatShard
from .lasting import GatheredOnce
from .optimizers import num_steps
from .reads import GATHERED


def start(shard: FlatShard) -> GatheredOnce:
    """Start the gathers of a shard, of the dtypes that calls would send."""
    layout, data = shard.layout, shard.data.detach()
    sent = data.to(device=layout.compute_device or data.device, dtype=layout.casts[0] or data.dtype)
    size, group = layout.shards.size, layout.shards.group
    taken = [(slot.offset, shard_numel(slot.rows, size)) for slot in layout.slots]
    parts = start_gathers([sent[begin : begin + numel] for begin, numel in taken], size, group)
    return GatheredOnce(parts, shard.data, num_steps())


def _is_of(gathered: GatheredOnce, shard: FlatShard) -> bool:
    """Whether the shard has the values and the casts that it had."""
    dtype = shard.layout.casts[0] or shard.data.dtype
    is_same = gathered.data is shard.data and gathered.num_steps == num_steps()
    return is_same and all(part.dtype == dtype for part in gathered.parts)


def gather_once(shards: Sequence[FlatShard]) -> None:
    """Start the gathers of those that are not gathered as they are now."""
    new = [shard for shard in shards if shard.gathered is None or not _is_of(shard.gathered, shard)]
    if new:
        groups = dict.fromkeys(shard.layout.shards.group for shard in new)
        what = "the gather of parameters for several calls"
        with running_alone(what, new[0].agreement, *groups), torch.no_grad():
            for shard in new:
                drop(shard)
                shard.gathered = start(shard)


def lend(shards: Sequence[FlatShard], lasting: Collection[FlatShard]) -> None:
    """Before a call: its reads get what was gathered, for earlier calls or now, for those that are `lasting`."""
    gather_once([shard for shard in shards if shard.gathered is not None or shard in lasting])
    for shard in shards:
        if shard.gathered is not None:
            for read, part in zip(shard.reads, shard.gathered.parts, strict=True):
                read.gathered = part
            shard.key = shard.key.removesuffix(GATHERED) + GATHERED


def take_back(shards: Sequence[FlatShard], lasting: Collection[FlatShard]) -> None:
    """After a call, whose backward has what it needs: only what is `lasting` is there for another call."""
    for shard in shards:
        if shard.key.endswith(GATHERED):
            shard.key = shard.key.removesuffix(GATHERED)
            for read in shard.reads:
                read.gathered = None
            if shard not in lasting:
                drop(shard)


def end_step(shards: Sequence[FlatShard]) -> None:
    """Gradients are reduced, and an optimizer may step; but for shards whose gradients are kept on."""
    for shard in shards:
        if not shard.keeps_gradients:
            shard.stays_full.end_step()
            shard.stays_kept.end_step()
            drop(shard)


def drop(shard: FlatShard) -> None:
    """What was gathered is not there any more; what no call has used is waited for before its memory is given back."""
    gathered, shard.gathered = shard.gathered, None
    if gathered is not None:
        gathered.wait()
