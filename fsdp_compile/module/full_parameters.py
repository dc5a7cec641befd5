"""Full parameters outside of a forward: `model.summon_full_params()`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..layout.buckets import Layout, Slot
from ..layout.distribution import local_part
from ..passes.padding import shard_numel, shard_rows
from ..runtime.assembly import ASSEMBLE
from ..runtime.collectives import gather_chunk, running_alone
from ..runtime.flat_shard import FlatShard
from ..runtime.views import laid_out_as, local_tensor, local_views, part_of_rank
from .sharding import Sharding


@dataclasses.dataclass(frozen=True)
class SummonOptions:
    """What `summon_full_params` is asked for."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise ConfigError(f"{field.name} is a bool, not {value!r}")
        if self.writeback and self.rank0_only:
            raise ConfigError(
                "summon_full_params(rank0_only=True) cannot write back what only one rank holds: pass writeback=False"
            )


@dataclasses.dataclass(frozen=True)
class Full:
    """A full parameter, and the one whose place it takes; shard and slot of the latter, if it is sharded."""

    name: str
    parameter: nn.Parameter
    full: nn.Parameter
    shard: FlatShard | None = None
    slot: Slot | None = None

    def write_back(self, *, with_grads: bool) -> None:
        """Copy this rank's part of the full parameter, and of its gradient, to where they came from."""
        if self.full.shape != self.parameter.shape:
            raise RuntimeError(
                f"{self.name} has shape {tuple(self.full.shape)} at the end of summon_full_params, "
                f"and had {tuple(self.parameter.shape)}: it was not written back"
            )
        _local(self.parameter).copy_(self._part(self.full))
        if not with_grads:
            return
        gradient = self.full.grad
        if gradient is None:
            self.parameter.grad = None
        elif self.parameter.grad is not None:
            _local(self.parameter.grad).copy_(self._part(gradient))
        else:
            local = _local(self.parameter)
            part = torch.empty_like(local, dtype=self.parameter.grad_dtype).copy_(self._part(gradient))
            self.parameter.grad = laid_out_as(self.parameter, part)

    def _part(self, full: torch.Tensor) -> torch.Tensor:
        if self.shard is None or self.slot is None:
            return _local(full)
        return part_of_rank(local_part(full), self.slot.dim, self.shard.layout, self.shard.mesh)


@contextmanager
def summon(
    model: nn.Module,
    options: SummonOptions,
    sharding: Sharding,
    only: Collection[nn.Parameter] | None = None,
) -> Iterator[None]:
    """`model.summon_full_params`, whose arguments are checked.

    Args:
        model: what was sharded, or a part of it.
        sharding: that of the whole.
        only: which parameters of `model`; None is all.
    """
    sharding.refuse_if_summoned("summon_full_params")
    sharding.reshard()
    if sharding.running:
        raise RuntimeError("summon_full_params was called in a forward or a backward: call it between them")
    sharding.check()
    fulls = list(_full_parameters(model, sharding, options, set(model.parameters()) if only is None else only))
    places = _places(model, fulls)
    for module, name, full in places:
        module._parameters[name] = full.full
    sharding.is_summoned = True
    try:
        yield
    finally:
        replaced = [full.name for module, name, full in places if module._parameters.get(name) is not full.full]
        for module, name, full in places:
            module._parameters[name] = full.parameter
        sharding.is_summoned = False
        if options.writeback:
            _write_back(fulls, replaced, with_grads=options.with_grads)


def _places(model: nn.Module, fulls: list[Full]) -> list[tuple[nn.Module, str, Full]]:
    """Where the modules hold the parameters: tied ones in several places."""
    full_of_parameter = {full.parameter: full for full in fulls}
    return [
        (module, name, full_of_parameter[parameter])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in full_of_parameter
    ]


@torch.no_grad()
def _write_back(fulls: list[Full], replaced: list[str], *, with_grads: bool) -> None:
    for full in fulls:
        if full.name not in replaced:
            full.write_back(with_grads=with_grads)
    if replaced:
        raise RuntimeError(
            f"{', '.join(replaced)}: replaced inside summon_full_params, and not written back; write into the "
            "parameters instead (copy_, or load_state_dict without assign)"
        )


def _full_parameters(
    model: nn.Module, sharding: Sharding, options: SummonOptions, only: Collection[nn.Parameter]
) -> Iterator[Full]:
    """Gather one bucket after the other; nothing on ranks that are to receive nothing."""
    if sharding.mesh is None:
        for name, parameter in model.named_parameters():
            if parameter not in only:
                continue
            gradient = parameter.grad if options.with_grads else None
            yield Full(name, parameter, _parameter(parameter.detach(), gradient, parameter, options))
        return
    receives = not options.rank0_only or not any(sharding.mesh.get_coordinate() or [])
    for shard in sharding.shards:
        if any(parameter in only for parameter in shard.parameters):
            fulls = _gather_bucket(shard, options)
            if receives:
                yield from (full for full in fulls if full.parameter in only)


@torch.no_grad()
def _gather_bucket(shard: FlatShard, options: SummonOptions) -> list[Full]:
    values = _gather(shard, shard.data.detach())
    # Whichever gradients this rank has: the others take part.
    gradients = _gather(shard, _flat_gradient(shard)) if options.with_grads else None
    fulls = []
    for index, (slot, parameter) in enumerate(zip(shard.layout.slots, shard.parameters, strict=True)):
        gradient = None if gradients is None or parameter.grad is None else gradients[index]
        full = _parameter(values[index], gradient, parameter, options, slot)
        fulls.append(Full(slot.parameter, parameter, full, shard, slot))
    return fulls


def _flat_gradient(shard: FlatShard) -> torch.Tensor:
    flat = torch.zeros_like(shard.data)
    for view, parameter in zip(local_views(flat, shard.layout, shard.mesh), shard.parameters, strict=True):
        if parameter.grad is not None:
            view.copy_(_local(parameter.grad))
    return flat


def _gather(shard: FlatShard, flat: torch.Tensor) -> list[torch.Tensor]:
    """The full tensors of a bucket on the mesh's device, from what every rank's shard (or its gradient) holds."""
    layout = shard.layout
    if flat.is_meta:
        raise RuntimeError(f"{layout.slots[0].parameter} has no values on the meta device: call model.to_empty first")
    num_ranks, group = layout.shards.size, layout.shards.group
    gathered = flat.to(shard.mesh.device_type)
    if num_ranks > 1:
        with running_alone(f"the gather of all of {layout.bucket}", shard.agreement, group):
            gathered = gather_chunk(gathered, num_ranks, group)
    return full_tensors(gathered, layout)


def full_tensors(gathered: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The full tensors in what all ranks' shards hold, one after another."""
    num_ranks = layout.shards.size
    gathered = gathered.view(num_ranks, -1)
    return [
        full_tensor(gathered[:, slot.offset : slot.offset + shard_numel(slot.rows, num_ranks)], slot, num_ranks)
        for slot in layout.slots
    ]


def full_tensor(chunks: torch.Tensor, slot: Slot, num_ranks: int) -> torch.Tensor:
    """The full tensor of which these are all ranks' rows."""
    if not slot.shape:
        return chunks.reshape(())
    num_rows, *inner = slot.rows
    rows = chunks.reshape(num_ranks * shard_rows(slot.rows, num_ranks), *inner)[:num_rows]
    return ASSEMBLE(rows, slot.shape, slot.dim, num_ranks) if slot.dim else rows


def _parameter(
    value: torch.Tensor,
    gradient: torch.Tensor | None,
    like: nn.Parameter,
    options: SummonOptions,
    slot: Slot | None = None,
) -> nn.Parameter:
    """A plain parameter with storage of its own, as small as the parameter; a DTensor for one that is distributed."""
    device = torch.device("cpu") if options.offload_to_cpu else value.device

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty_like(tensor, device=device).copy_(tensor)
        return copy if slot is None else slot.distributed(copy)

    full = nn.Parameter(copied(value), like.requires_grad)
    if gradient is not None:
        full.grad_dtype = gradient.dtype
        full.grad = copied(gradient)
    return full


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()
