"""Lower the dialect to torch's functional collectives and ATen, which Inductor compiles and eager runs.

    Before   g = wait(all_gather(shard)); w = copy_out(g); mm(x, t(w)); free(w)
    After    g = wait_tensor(all_gather_into_tensor(shard)); w = view(clone(slice(view(g)))); mm(x, t(w))
    Needs    gathers and reductions in their final places
    Keeps    data flow, order
    Cost     O(nodes)

Frees disappear: with the last use of a value, the generated code ends its life. The grouped forms become one coalesced
call over slices of the shard (or over the gradients) with one wait for each result, all where the dialect waits.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.fx

from . import ops

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class LowerCollectives:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        lowering = _Lowering(gm.graph)
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.target in _RULES:
                with gm.graph.inserting_before(node):
                    result = _RULES[node.target](lowering, node)
                if result is not None:
                    node.replace_all_uses_with(result)
                    lowering.erased.append(node)
        for node in reversed(lowering.erased):
            gm.graph.erase_node(node)


@dataclasses.dataclass
class _Lowering:
    """The graph, and what the grouped calls have brought so far: by their node, the results by offset."""

    graph: torch.fx.Graph
    pieces: dict[torch.fx.Node, dict[int, torch.fx.Node]] = dataclasses.field(default_factory=dict)
    erased: list[torch.fx.Node] = dataclasses.field(default_factory=list)

    def call(self, target: Any, *args: Any, like: torch.fx.Node) -> torch.fx.Node:
        return ops.call(self.graph, target, *args, like=like)

    def contiguous(self, node: torch.fx.Node) -> torch.fx.Node:
        """`node`, copied if it does not lie in memory in the order of its elements."""
        if node.meta["val"].is_contiguous():
            return node
        return self._copy(node)

    def _copy(self, node: torch.fx.Node) -> torch.fx.Node:
        copied = self.graph.call_function(_aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        copied.meta = {**node.meta, "val": node.meta["val"].clone(memory_format=torch.contiguous_format)}
        copied.meta.pop("tensor_meta", None)
        return copied

    def section(self, node: torch.fx.Node, dim: int, begin: int, end: int, like: torch.fx.Node) -> torch.fx.Node:
        """Elements [begin, end) along `dim`: `node` itself where that is all."""
        if begin == 0 and end == node.meta["val"].shape[dim]:
            return node
        return self.call(_aten.slice.Tensor, node, dim, begin, end, like=like)

    def padded_rows(self, gradient: torch.fx.Node, world_size: int, like: torch.fx.Node) -> torch.fx.Node:
        """A full gradient as 1-D tensor of `world_size` chunks, zeros after its last row."""
        value = gradient.meta["val"]
        missing = ops.shard_numel(value.shape, world_size) * world_size - value.numel()
        flat = self.call(_aten.view.default, self.contiguous(gradient), [value.numel()], like=like)
        return self.call(_aten.constant_pad_nd.default, flat, [0, missing], like=like) if missing else flat

    def joined(self, pieces: dict[int, torch.fx.Node], numel: int, like: torch.fx.Node) -> torch.fx.Node:
        """A [rows, numel] tensor with every [rows, n] piece at its offset and zeros elsewhere."""
        parts: list[torch.fx.Node] = []
        filled = 0
        for offset, piece in sorted(pieces.items()):
            if offset > filled:
                parts.append(self._zeros(piece, offset - filled, like))
            parts.append(piece)
            filled = offset + piece.meta["val"].shape[1]
        if numel > filled:
            parts.append(self._zeros(parts[0], numel - filled, like))
        return parts[0] if len(parts) == 1 else self.call(_aten.cat.default, parts, 1, like=like)

    def _zeros(self, piece: torch.fx.Node, numel: int, like: torch.fx.Node) -> torch.fx.Node:
        value = piece.meta["val"]
        shape, options = [value.shape[0], numel], {"dtype": value.dtype, "device": value.device}
        zeros = self.graph.call_function(_aten.full.default, (shape, 0), options)
        zeros.meta = {"val": value.new_zeros(shape)}
        return zeros


def _all_gather(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    shard, _, world_size, group = node.args
    return lowering.call(_c10d.all_gather_into_tensor.default, shard, world_size, group, like=node)


def _all_gather_grouped(lowering: _Lowering, node: torch.fx.Node) -> None:
    shard, _, world_size, group = node.args
    outs = [out for wait in node.users for out in wait.users if ops.is_parameter_out(out)]
    slices = []
    for out in outs:
        offset, shape = ops.argument(out, "offset"), ops.argument(out, "shape")
        end = offset + ops.shard_numel(shape, world_size)  # type: ignore[arg-type]
        slices.append(lowering.section(shard, 0, offset, end, node))  # type: ignore[arg-type]
    offsets = [ops.argument(out, "offset") for out in outs]
    target = _c10d.all_gather_into_tensor_coalesced.default
    _coalesced(lowering, node, offsets, target, slices, world_size, group)


def _reduce_scatter(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    packed, _, world_size, group, reduction = node.args
    return lowering.call(_c10d.reduce_scatter_tensor.default, packed, reduction, world_size, group, like=node)


def _reduce_scatter_grouped(lowering: _Lowering, node: torch.fx.Node) -> None:
    gradients, _, _, offsets, _, world_size, group, reduction = node.args
    padded = [lowering.padded_rows(gradient, world_size, node) for gradient in gradients]  # type: ignore[union-attr,arg-type]
    target = _c10d.reduce_scatter_tensor_coalesced.default
    _coalesced(lowering, node, offsets, target, padded, reduction, world_size, group)


def _coalesced(lowering: _Lowering, node: torch.fx.Node, offsets: Any, target: Any, *args: Any) -> None:
    """One coalesced call; the waits for its results come where `_wait` finds the dialect's wait."""
    call = lowering.call(target, *args, like=node)
    results = [lowering.call(operator.getitem, call, index, like=node) for index in range(len(offsets))]
    lowering.pieces[node] = dict(zip(offsets, results, strict=True))
    lowering.erased.append(node)


def _all_reduce(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gradient, _, _, group, reduction = node.args
    return lowering.call(_c10d.all_reduce.default, gradient, reduction, group, like=node)


def _wait(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node | None:
    pending: Any = node.args[0]
    if pending not in lowering.pieces:
        return lowering.call(_c10d.wait_tensor.default, pending, like=node)
    ready = {
        offset: lowering.call(_c10d.wait_tensor.default, piece, like=node)
        for offset, piece in lowering.pieces[pending].items()
    }
    if ops.is_all_gather(pending):
        lowering.pieces[node] = ready
        lowering.erased.append(node)
        return None
    numel = node.meta["val"].numel()
    rows = {
        offset: lowering.call(_aten.view.default, piece, [1, piece.meta["val"].numel()], like=node)
        for offset, piece in ready.items()
    }
    return lowering.call(_aten.view.default, lowering.joined(rows, numel, node), [numel], like=node)


def _copy_out(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, offset, shape, world_size = node.args
    numel = gathered.meta["val"].numel() // world_size
    end = offset + ops.shard_numel(shape, world_size)  # type: ignore[arg-type,operator]
    by_rank = lowering.call(_aten.view.default, gathered, [world_size, numel], like=node)
    chunks = lowering._copy(lowering.section(by_rank, 1, offset, end, node))  # type: ignore[arg-type]
    return _in_shape(lowering, chunks, node)


def _view_out(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, offset, shape, world_size = node.args
    if gathered in lowering.pieces:
        return _in_shape(lowering, lowering.pieces[gathered][offset], node)  # type: ignore[index]
    if world_size == 1:
        gathered = lowering.section(gathered, 0, offset, offset + math.prod(shape), node)  # type: ignore[arg-type,operator]
    return _in_shape(lowering, gathered, node)


def _in_shape(lowering: _Lowering, chunks: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
    """The parameter from its ranks' chunks, in order in `chunks`: padding of the last rows is cut off."""
    shape: Any = ops.argument(node, "shape")
    if not shape:
        return lowering.call(_aten.view.default, chunks, [], like=node)
    rows = ops.argument(node, "world_size") * ops.shard_rows(shape, ops.argument(node, "world_size"))
    full = lowering.call(_aten.view.default, chunks, [rows, *shape[1:]], like=node)
    return lowering.section(full, 0, 0, shape[0], node)


def _pack(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gradients, _, _, offsets, numel, world_size = node.args
    pieces = {}
    for gradient, offset in zip(gradients, offsets, strict=True):  # type: ignore[arg-type]
        padded = lowering.padded_rows(gradient, world_size, node)  # type: ignore[arg-type]
        chunk = padded.meta["val"].numel() // world_size
        pieces[offset] = lowering.call(_aten.view.default, padded, [world_size, chunk], like=node)
    joined = lowering.joined(pieces, numel, node)  # type: ignore[arg-type]
    return lowering.call(_aten.view.default, joined, [world_size * numel], like=node)  # type: ignore[operator]


def _free(lowering: _Lowering, node: torch.fx.Node) -> None:
    lowering.erased.append(node)


_RULES: dict[Any, Any] = {
    ops.ALL_GATHER: _all_gather,
    ops.ALL_GATHER_GROUPED: _all_gather_grouped,
    ops.REDUCE_SCATTER: _reduce_scatter,
    ops.REDUCE_SCATTER_GROUPED: _reduce_scatter_grouped,
    ops.ALL_REDUCE: _all_reduce,
    ops.WAIT: _wait,
    ops.COPY_OUT: _copy_out,
    ops.VIEW_OUT: _view_out,
    ops.PACK: _pack,
    ops.FREE: _free,
}
