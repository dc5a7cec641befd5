"""Unsharding by hand: `module.unshard()` gathers the module's own units in eager, until `reshard()` or a call.

A call takes what is gathered of units that may stay full from call to call (`runtime/gathered_once.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from ..runtime.collectives import running_alone
from ..runtime.flat_shard import FlatShard
from ..runtime.gathered_once import gather_once, start
from .full_parameters import full_tensor, full_tensors
from .own_units import OwnUnits, Replaced, Unsharded
from .sharding import Sharding


def start_unsharding(own: OwnUnits, sharding: Sharding) -> Unsharded:
    """Start gathering the units, which are a part of this model; what is returned is theirs, and to be waited for."""
    if own.unsharded is not None:
        return own.unsharded
    own.choose_casts()
    for shard in own.shards:
        if shard.data.is_meta:
            raise RuntimeError(
                f"{shard.layout.slots[0].parameter} has no values on the meta device: call model.to_empty first"
            )
        shard.check_views()
    gather_once(sharding.that_can_last(own.shards))
    started = [(shard, _start(shard)) for shard in own.shards]

    def gather() -> list[Replaced]:
        return [place for shard, finish in started for place in _replaced(own, shard, finish())]

    own.unsharded = Unsharded(gather)
    return own.unsharded


@torch.no_grad()
def _start(shard: FlatShard) -> Callable[[], list[torch.Tensor]]:
    """Start the all-gather of a bucket, as a forward would; what waits for it, and returns the full parameters."""
    layout, num_ranks, group = shard.layout, shard.layout.shards.size, shard.layout.shards.group
    if num_ranks == 1:
        flat = shard.data.detach().to(shard.mesh.device_type).to(layout.casts[0] or shard.data.dtype)
        return lambda: full_tensors(flat, layout)
    what = f"the gather of all of {layout.bucket}"
    with running_alone(what, shard.agreement, group):
        started = shard.gathered or start(shard)

    def finish() -> list[torch.Tensor]:
        with running_alone(f"the wait for {what}", shard.agreement, group):
            parts = started.wait()
        return [full_tensor(part, slot, num_ranks) for part, slot in zip(parts, layout.slots, strict=True)]

    return finish


@torch.no_grad()
def _replaced(own: OwnUnits, shard: FlatShard, gathered: list[torch.Tensor]) -> list[Replaced]:
    """Where the modules hold the parameters of a bucket, and what is to stand there: storage of its own for each."""
    fulls = {}
    for slot, parameter, full in zip(shard.layout.slots, shard.parameters, gathered, strict=True):
        copied = slot.distributed(full.clone(memory_format=torch.contiguous_format))
        fulls[parameter] = nn.Parameter(copied, parameter.requires_grad)
    holders = [below for module in own.modules for below in module.modules()]
    holders += [module for module, _ in shard.owners]
    return [
        Replaced(module, name, parameter, fulls[parameter], fulls[parameter]._version)
        for module in dict.fromkeys(holders)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in fulls
    ]
