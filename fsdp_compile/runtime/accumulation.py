"""Gradients that are kept: a step that does not reduce leaves them, full, in a leaf of their own."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn as nn

from ..layout.buckets import Layout


@dataclasses.dataclass(eq=False)
class Accumulation:
    """Full gradients of a bucket that are yet to be reduced.

    Attributes:
        leaf: its `.grad` is a 1-D tensor, `world_size` times as long as the shard, laid out as `fsdp::pack` does; it
            takes no memory itself.
        offsets: of the parameters that have a part in it, on this rank.
        doubtful: of those that may have one on some ranks only; the same on all ranks.
        is_taken: whether the running backward has added it to its own gradients.
    """

    leaf: nn.Parameter
    offsets: set[int] = dataclasses.field(default_factory=set)
    doubtful: set[int] = dataclasses.field(default_factory=set)
    is_taken: bool = False

    @classmethod
    def of(cls, layout: Layout, shard: torch.Tensor) -> Accumulation:
        """Nothing yet, in the dtype of the shard or that of the reduction, if that is wider."""
        dtype = torch.promote_types(shard.dtype, layout.reduce_dtype or shard.dtype)
        one = torch.empty((), dtype=dtype, device=layout.compute_device or shard.device)
        return cls(nn.Parameter(one.expand(layout.shards.size * layout.numel)))

    def moved(self, layout: Layout, shard: torch.Tensor) -> Accumulation:
        """The same for a shard that has moved to another dtype or device."""
        found = Accumulation.of(layout, shard)
        found.offsets, found.doubtful = self.offsets, self.doubtful
        if self.leaf.grad is not None:
            found.leaf.grad = self.leaf.grad.to(found.leaf)
        return found

    def clear(self) -> None:
        self.leaf.grad, self.is_taken = None, False
        self.offsets.clear()
        self.doubtful.clear()
