"""Full precision in evaluation, as FSDP1 has it: while a unit's module is in evaluation mode, nothing of it is cast."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn as nn

from ..layout.precision import CastInputs, CastOutputs
from ..runtime.flat_shard import FlatShard
from ..runtime.reads import LocalRead


@dataclasses.dataclass(frozen=True)
class CastBuffer:
    """A buffer that was cast, and the dtype that it had before."""

    module: nn.Module
    name: str
    low: torch.dtype
    full: torch.dtype


@dataclasses.dataclass(eq=False)
class FullInEvaluation:
    """What is cast of a unit, but for its evaluation.

    Attributes:
        module: whose mode decides.
        indices: of the shards, among those that were sharded by the same call.
        reads: with a single rank, of its parameters.
        casts: at the boundaries of its modules.
    """

    module: nn.Module
    indices: list[int] = dataclasses.field(default_factory=list)
    reads: list[LocalRead] = dataclasses.field(default_factory=list)
    casts: list[CastInputs | CastOutputs] = dataclasses.field(default_factory=list)
    buffers: list[CastBuffer] = dataclasses.field(default_factory=list)

    def prepare(self, shards: Sequence[FlatShard]) -> None:
        """Before a forward, have the casts that the mode of the module asks for.

        Args:
            shards: all that were sharded by the same call.
        """
        is_full = not self.module.training
        for shard in (shards[index] for index in self.indices):
            if shard.layout.is_full != is_full:
                shard.change_layout(dataclasses.replace(shard.layout, is_full=is_full))
        for each in (*self.reads, *self.casts):
            each.is_full = is_full
        for cast in self.buffers:
            buffer, dtype = cast.module._buffers.get(cast.name), cast.full if is_full else cast.low
            if buffer is not None and buffer.dtype != dtype:
                buffer.data = buffer.data.to(dtype)
