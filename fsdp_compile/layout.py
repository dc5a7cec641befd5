"""Layouts: which place every parameter takes in the shard of its bucket. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn as nn

from .errors import ConfigError
from .passes import ops
from .units import Unit

_ALIGNMENT = 16  # bytes; collectives lose much of their bandwidth on unaligned messages (NVIDIA/nccl#413)


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis: how many ranks, and the name of their process group."""

    size: int
    group: str


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of one parameter in a shard, in elements."""

    parameter: str
    offset: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shard of one bucket: the parameters of a unit that share dtype, requires_grad and device.

    Attributes:
        bucket: `unit`, or `unit/dtype...` where the unit has several buckets.
        numel: elements of the shard, on every rank.
        shards: the axis over which it is sharded; of size 1 for 0-d parameters, which every rank keeps whole.
        replicas: the axis over which gradients are reduced besides; 0-d parameters have all ranks here.
    """

    bucket: str
    slots: tuple[Slot, ...]
    numel: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shards: Axis
    replicas: Axis
    reduction: str

    def unshard_arguments(self, slot: Slot) -> tuple[Any, ...]:
        """The arguments of `fsdp::unshard` after the shard."""
        return (
            self.bucket,
            slot.parameter,
            slot.offset,
            slot.shape,
            self.shards.size,
            self.shards.group,
            self.replicas.size,
            self.replicas.group,
            self.reduction,
        )


def check_parameters(model: nn.Module) -> None:
    """Raise ConfigError, naming the parameter, for one that cannot be sharded."""
    for name, parameter in model.named_parameters():
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}; FSDP shards floating point parameters only: "
                "make it a buffer"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(f"{name} has no shape yet: run the lazy module once before sharding it")


def lay_out(units: list[Unit], shards: Axis, replicas: Axis, everyone: Axis, reduction: str) -> list[Layout]:
    """The layout of every bucket, in the order of the units.

    Args:
        everyone: the axis of all ranks, over which the gradients of 0-d parameters are reduced.
    """
    layouts = []
    for unit in units:
        buckets: dict[tuple[Any, ...], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in unit.parameters:
            key = (parameter.dtype, parameter.requires_grad, parameter.dim() == 0, parameter.device)
            buckets.setdefault(key, []).append((name, parameter))
        for key, parameters in buckets.items():
            axes = (Axis(1, ""), everyone) if parameters[0][1].dim() == 0 else (shards, replicas)
            on_several_devices = len({device for *_, device in buckets}) > 1
            bucket = unit.name if len(buckets) == 1 else f"{unit.name}/{_suffix(*key, on_several_devices)}"
            layouts.append(_layout(bucket, parameters, *axes, reduction))
    return layouts


def _suffix(
    dtype: torch.dtype, requires_grad: bool, is_replicated: bool, device: torch.device, on_several_devices: bool
) -> str:
    parts = [str(dtype).removeprefix("torch.")]
    parts += [] if requires_grad else ["frozen"]
    parts += ["replicated"] if is_replicated else []
    parts += [str(device)] if on_several_devices else []
    return ".".join(parts)


def _layout(
    bucket: str, parameters: list[tuple[str, nn.Parameter]], shards: Axis, replicas: Axis, reduction: str
) -> Layout:
    first = parameters[0][1]
    step = max(1, _ALIGNMENT // first.element_size())
    slots = []
    numel = 0
    for name, parameter in parameters:
        slots.append(Slot(name, numel, tuple(parameter.shape)))
        taken = max(1, ops.shard_numel(parameter.shape, shards.size))  # an empty parameter too has its own offset
        numel += -(-taken // step) * step
    common = first.dtype, first.device, first.requires_grad
    return Layout(bucket, tuple(slots), numel, *common, shards, replicas, reduction)
