"""Unsharding by hand: `module.unshard()` gathers the module's own units in eager, until `reshard()` or a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from ..runtime.collectives import running_alone, start_gather, wait
from ..runtime.flat_shard import FlatShard
from .full_parameters import full_tensors
from .own_units import OwnUnits, Replaced, Unsharded


def start_unsharding(own: OwnUnits) -> Unsharded:
    """Start gathering the units; what is returned is theirs, and to be waited for."""
    if own.unsharded is not None:
        return own.unsharded
    own.choose_casts()
    for shard in own.shards:
        if shard.data.is_meta:
            raise RuntimeError(
                f"{shard.layout.slots[0].parameter} has no values on the meta device: call model.to_empty first"
            )
        shard.check_views()
    started = [(shard, _start(shard)) for shard in own.shards]

    def gather() -> list[Replaced]:
        return [place for shard, finish in started for place in _replaced(own, shard, finish())]

    own.unsharded = Unsharded(gather)
    return own.unsharded


@torch.no_grad()
def _start(shard: FlatShard) -> Callable[[], torch.Tensor]:
    """Start the all-gather of a bucket, as a forward would; what waits for it."""
    layout, num_ranks, group = shard.layout, shard.layout.shards.size, shard.layout.shards.group
    flat = shard.data.detach().to(shard.mesh.device_type).to(layout.casts[0] or shard.data.dtype)
    if num_ranks == 1:
        return lambda: flat
    what = f"the gather of all of {layout.bucket}"
    with running_alone(what, shard.agreement, group):
        started = start_gather(flat, num_ranks, group)

    def finish() -> torch.Tensor:
        with running_alone(f"the wait for {what}", shard.agreement, group):
            return wait(started)

    return finish


@torch.no_grad()
def _replaced(own: OwnUnits, shard: FlatShard, gathered: torch.Tensor) -> list[Replaced]:
    """Where the modules hold the parameters of a bucket, and what is to stand there: storage of its own for each."""
    fulls = {}
    for slot, parameter, full in zip(
        shard.layout.slots, shard.parameters, full_tensors(gathered, shard.layout), strict=True
    ):
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
