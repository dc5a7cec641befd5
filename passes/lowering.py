"""Lowering: what the rules of `lower_collectives` and `lower_forms` share, a graph that is being lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx

from . import forms, metadata, ops
from .padding import shard_numel

_aten = torch.ops.aten

Gap = Callable[[int, int], torch.fx.Node]
"""What stands in [begin, end) of a shard where no piece does."""


@dataclasses.dataclass
class Lowering:
    """The graph, and what was lowered so far.

    Attributes:
        pieces: what the grouped calls have brought: by their node, the results by offset.
        by_rank: the buffers from which parameters are copied, as [world_size, n].
        blocks: what is packed as integers, by where that is in a rank's part and by the first gradient beside it.
    """

    graph: torch.fx.Graph
    poison: bool
    pieces: dict[torch.fx.Node, dict[int, torch.fx.Node]] = dataclasses.field(default_factory=dict)
    by_rank: dict[torch.fx.Node, torch.fx.Node] = dataclasses.field(default_factory=dict)
    blocks: dict[tuple[int, torch.fx.Node], forms.Blocks] = dataclasses.field(default_factory=dict)
    erased: list[torch.fx.Node] = dataclasses.field(default_factory=list)

    def call(self, target: Any, *args: Any, like: torch.fx.Node) -> torch.fx.Node:
        return ops.call(self.graph, target, *args, like=like)

    def contiguous(self, node: torch.fx.Node) -> torch.fx.Node:
        """`node`, copied if it does not lie in memory in the order of its elements."""
        if node.meta["val"].is_contiguous():
            return node
        return self.copied(node)

    def copied(self, node: torch.fx.Node) -> torch.fx.Node:
        copied = self.graph.call_function(_aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        metadata.describe(copied, node.meta["val"].clone(memory_format=torch.contiguous_format), like=node)
        return copied

    def section(self, node: torch.fx.Node, dim: int, begin: int, end: int, like: torch.fx.Node) -> torch.fx.Node:
        """Elements [begin, end) along `dim`: `node` itself where that is all."""
        if begin == 0 and end == node.meta["val"].shape[dim]:
            return node
        return self.call(_aten.slice.Tensor, node, dim, begin, end, like=like)

    def cast(self, value: torch.fx.Node, dtype: Any, like: torch.fx.Node) -> torch.fx.Node:
        found: torch.fx.Node = forms.cast(partial(self.call, like=like), value, value.meta["val"].dtype, dtype)
        return found

    def stored(self, shard: torch.fx.Node, like: torch.fx.Node) -> torch.fx.Node:
        """A shard whose slices are sent: computed once, not slice by slice, where a pass computes it."""
        return shard if shard.op == "placeholder" or ops.is_copy(shard) else self.call(ops.STORE, shard, like=like)

    def padded_rows(self, gradient: torch.fx.Node, world_size: int, like: torch.fx.Node) -> torch.fx.Node:
        """A full gradient as 1-D tensor of `world_size` chunks, zeros after its last row."""
        value = gradient.meta["val"]
        missing = shard_numel(value.shape, world_size) * world_size - value.numel()
        flat = self.call(_aten.view.default, self.contiguous(gradient), [value.numel()], like=like)
        return self.call(_aten.constant_pad_nd.default, flat, [0, missing], like=like) if missing else flat

    def chunks(self, node: torch.fx.Node) -> dict[int, torch.fx.Node]:
        """The gradients that `node` reduces, by offset, each as [world_size, n] in the dtype of the reduction.

        What was kept of earlier steps is added. What is sent in forms is not cast.
        """
        names = ("gradients", "accumulated", "offsets", "world_size", "dtype", "forms")
        gradients, accumulated, offsets, world_size, dtype, names_of_forms = (ops.argument(node, n) for n in names)
        chunks = {}
        for gradient, offset in zip(gradients, offsets, strict=True):
            value = gradient.meta["val"]
            taken = shard_numel(value.shape, world_size)
            is_whole = taken * world_size == value.numel()
            rows = self.contiguous(gradient) if is_whole else self.padded_rows(gradient, world_size, node)
            chunk = self.call(_aten.view.default, rows, [world_size, taken], like=node)
            if accumulated is not None:
                kept = self.left(node, "accumulated", offset, offset + taken)
                chunk = self.call(_aten.add.Tensor, self.cast(chunk, kept.meta["val"].dtype, node), kept, like=node)
            chunks[offset] = chunk if names_of_forms else self.cast(chunk, dtype, node)
        return chunks

    def left(self, node: torch.fx.Node, argument: str, begin: int, end: int) -> torch.fx.Node:
        """Columns [begin, end) of what earlier steps have left of gradients, by the name of an argument of `node`."""
        shape = [ops.argument(node, "world_size"), ops.argument(node, "numel")]
        by_rank = self.call(_aten.view.default, ops.argument(node, argument), shape, like=node)
        return self.section(by_rank, 1, begin, end, node)

    def joined(
        self, pieces: dict[int, torch.fx.Node], numel: int, gap: Gap, like: torch.fx.Node, *, dim: int = 1
    ) -> torch.fx.Node:
        """A [rows, numel] tensor with every [rows, n] piece at its offset, or with dim=0 all without the rows.

        `gap(begin, end)` fills the rest.
        """
        parts: list[torch.fx.Node] = []
        filled = 0
        for offset, piece in sorted(pieces.items()):
            if offset > filled:
                parts.append(gap(filled, offset))
            parts.append(piece)
            filled = offset + piece.meta["val"].shape[dim]
        if numel > filled:
            parts.append(gap(filled, numel))
        return parts[0] if len(parts) == 1 else self.call(_aten.cat.default, parts, dim, like=like)

    def message(
        self, piece: torch.fx.Node, lead: list[int], region: forms.Region, like: torch.fx.Node
    ) -> list[torch.fx.Node]:
        """The parts of a message for a region, whose elements are `piece`, in the dtype that `like` returns."""
        sent = forms.into_form(partial(self.call, like=like), piece, lead, region, piece.meta["val"].dtype)
        return [self.viewed(each, like.meta["val"].dtype, like) for each in sent]

    def viewed(self, value: torch.fx.Node, dtype: torch.dtype, like: torch.fx.Node) -> torch.fx.Node:
        """The same bytes as elements of this dtype."""
        return value if value.meta["val"].dtype == dtype else self.call(_aten.view.dtype, value, dtype, like=like)

    def zeros(self, pieces: dict[int, torch.fx.Node]) -> Gap:
        """Zeros like `pieces`."""
        value = next(iter(pieces.values())).meta["val"]

        def gap(begin: int, end: int) -> torch.fx.Node:
            shape, options = [value.shape[0], end - begin], {"dtype": value.dtype, "device": value.device}
            zeros = self.graph.call_function(_aten.full.default, (shape, 0), options)
            metadata.describe(zeros, value.new_zeros(shape))
            return zeros

        return gap
