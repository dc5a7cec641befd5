"""Reads: what a forward takes out of a shard where it reads a parameter."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
import torch.nn as nn

from ..layout.buckets import Layout, Slot
from ..layout.distribution import Distribution
from .assembly import ASSEMBLE


@dataclasses.dataclass
class Read:
    """What `fsdp::unshard` takes: the shard, and the constants that say what to take out of it.

    Attributes:
        parts: of a parameter that is not sharded on its first dimension, what `fsdp::assemble` takes besides.
        distribution: over other ranks, which a forward sees.
    """

    shard: Readable
    arguments: tuple[Any, ...]
    is_frozen: bool
    parts: tuple[Any, ...] | None = None
    distribution: Distribution | None = None

    @classmethod
    def of(cls, shard: Readable, layout: Layout, slot: Slot, *, is_frozen: bool) -> Read:
        parts = layout.assemble_arguments(slot)
        return cls(shard, layout.unshard_arguments(slot), is_frozen, parts, slot.distribution)

    def __call__(self, module: nn.Module, name: str) -> torch.Tensor:
        if not self.shard.key:  # Dynamo guards on it: a graph knows the shards that it was compiled for
            raise AssertionError("a shard without a key")
        gradient = "none" if self.is_frozen else self.shard.gradient
        full: torch.Tensor = torch.ops.fsdp.unshard.default(
            self.shard.data, self.shard.accumulated, gradient, *self.arguments
        )
        if self.parts is not None:
            full = ASSEMBLE(full, *self.parts)
        return full if self.distribution is None else self.distribution.around(full)


@dataclasses.dataclass
class LocalRead:
    """What a single rank computes with: the parameter, in another dtype unless `is_full`, on another device."""

    dtype: torch.dtype | None
    device: torch.device | None
    is_full: bool = False

    def __call__(self, module: nn.Module, name: str) -> torch.Tensor:
        parameter: Any = module._parameters[name]
        dtype = parameter.dtype if self.is_full or self.dtype is None else self.dtype
        return parameter.to(dtype=dtype, device=self.device or parameter.device)  # type: ignore[no-any-return]


class Readable(Protocol):
    """A shard; it may change its tensor, when the model moves to another dtype or device.

    `key` is another for every shard in the process. `gradient` and `accumulated` say where gradients go; `passes.ops`
    explains them.
    """

    key: str
    data: nn.Parameter
    gradient: str
    accumulated: nn.Parameter | None


@dataclasses.dataclass
class StandIn:
    """A shard for tracing only."""

    data: nn.Parameter
    key: str = "stand-in"
    gradient: str = "reduce"
    accumulated: nn.Parameter | None = None
