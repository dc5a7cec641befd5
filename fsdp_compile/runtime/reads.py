"""Reads: what a forward takes out of a shard where it reads a parameter."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..layout.buckets import Layout, Slot
from ..layout.distribution import Distribution, SummedOver
from .assembly import ASSEMBLE

GATHERED = " gathered"

_UNSHARD = torch.ops.fsdp.unshard.default


@dataclasses.dataclass
class Read:
    """What `fsdp::unshard` takes: the shard, and the constants that say what to take out of it.

    Dynamo guards on whatever is looked up here, of every parameter and before every call: constants are one tuple.

    Attributes:
        constants: whether the parameter is frozen; whether it is distributed; whether what messages lose of its
            gradient is fed back; of one that is not sharded on its first dimension, what `fsdp::assemble` takes
            besides; what `fsdp::unshard` takes besides.
        distribution: over other ranks, which a forward sees.
        gathered: all ranks' rows of the parameter, where they were gathered for several calls; on their way, maybe.
    """

    shard: Readable
    constants: tuple[bool, bool, bool, tuple[Any, ...] | None, tuple[Any, ...]]
    distribution: Distribution | SummedOver | None = None
    gathered: torch.Tensor | None = None

    @classmethod
    def of(cls, shard: Readable, layout: Layout, slot: Slot, *, is_frozen: bool) -> Read:
        parts, arguments = layout.assemble_arguments(slot), layout.unshard_arguments(slot)
        distribution = slot.read_as or slot.distribution
        constants = is_frozen, distribution is not None, layout.feeds_back, parts, arguments
        return cls(shard, constants, distribution)

    @property
    def is_frozen(self) -> bool:
        return self.constants[0]

    @is_frozen.setter
    def is_frozen(self, is_frozen: bool) -> None:
        self.constants = (is_frozen, *self.constants[1:])

    def sum_over(self, mesh: DeviceMesh) -> None:
        """Have the gradients of a parameter that is not distributed added up over the ranks of a mesh besides."""
        is_frozen, _, *rest = self.constants
        self.constants, self.distribution = (is_frozen, True, *rest), SummedOver(mesh)  # type: ignore[assignment]

    def change_layout(self, layout: Layout, slot: Slot) -> None:
        """Read by another layout of the same places from now on."""
        is_frozen, is_distributed, _, parts, _ = self.constants
        self.constants = is_frozen, is_distributed, layout.feeds_back, parts, layout.unshard_arguments(slot)


@dataclasses.dataclass
class LocalRead:
    """What a single rank computes with: the parameter, in another dtype unless `is_full`, on another device."""

    dtype: torch.dtype | None
    device: torch.device | None
    is_full: bool = False


def read_parameter(read: Read | LocalRead, module: nn.Module, name: str) -> torch.Tensor:
    """The full tensor of the parameter `name` of the module."""
    if isinstance(read, LocalRead):
        parameter: Any = module._parameters[name]
        dtype = parameter.dtype if read.is_full or read.dtype is None else read.dtype
        return parameter.to(dtype=dtype, device=read.device or parameter.device)  # type: ignore[no-any-return]
    is_frozen, is_distributed, feeds_back, parts, arguments = read.constants
    shard = read.shard
    key = shard.key
    if not key:  # Dynamo guards on it: a graph knows the shards that it was compiled for
        raise AssertionError("a shard without a key")
    gradient = "none" if is_frozen else shard.gradient
    if key.endswith(GATHERED):
        arguments = *arguments, read.gathered
    full: torch.Tensor = _UNSHARD(
        shard.data, shard.accumulated, shard.fed_back if feeds_back else None, gradient, *arguments
    )
    if parts is not None:
        full = ASSEMBLE(full, *parts)
    if not is_distributed or read.distribution is None:
        return full
    whole = read.distribution.around(full)
    return whole.to_local() if isinstance(whole, DTensor) and module._fsdp_reads_parts else whole


class Readable(Protocol):
    """A shard; it may change its tensor, when the model moves to another dtype or device.

    `key` is another for every shard in the process; it ends with `GATHERED` where reads bring what was gathered, which
    costs no guard of its own. The others say where gradients go, and what goes along: as they are
    called in `passes.ops`, but for `fed_back`, which is the residual.
    """

    key: str
    data: nn.Parameter
    gradient: str
    accumulated: nn.Parameter | None
    fed_back: nn.Parameter | None


@dataclasses.dataclass
class StandIn:
    """A shard for tracing only."""

    data: nn.Parameter
    key: str = "stand-in"
    gradient: str = "reduce"
    accumulated: nn.Parameter | None = None
    fed_back: nn.Parameter | None = None
