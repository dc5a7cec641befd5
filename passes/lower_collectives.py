"""Lower the dialect to torch's functional collectives and ATen, which Inductor compiles and eager runs.

    Before   g = wait(all_gather(shard)); w = copy_out(g); mm(x, t(w)); free(w)
    After    g = wait_tensor(all_gather_into_tensor(shard)); w = view(slice_copy(view(g))); mm(x, t(w))
    Needs    gathers and reductions in their final places
    Keeps    data flow, order
    Cost     O(nodes)

Frees disappear: with the last use of a value, the generated code ends its life. With `poison`, a debug mode, they fill
the buffer with NaN instead: a read of it after its free shows in what the step computes. The grouped forms become one
coalesced call over slices of the shard (or over the gradients) with one wait for each result, all where the dialect
waits.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from bisect import bisect_right
from itertools import accumulate
from typing import Any

import torch
import torch.fx

from . import lower_forms, metadata, ops
from .errors import refuse_calls, refuse_unplaced
from .lowering import Lowering
from .padding import shard_rows

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_COMPUTED = (  # what is made of a gradient on its way into a bucket, and where none stands
    _aten.add.Tensor,
    _aten.clone.default,
    _aten.constant_pad_nd.default,
    _aten.full.default,
    torch.ops.prims.convert_element_type.default,
)


@dataclasses.dataclass(frozen=True)
class LowerCollectives:
    poison: bool = dataclasses.field(default=False, metadata={"for": "debugging"})

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_unplaced(gm.graph)
        refuse_calls(gm.graph, ops.MOVE, until="OverlapCopies")
        lowering = Lowering(gm.graph, self.poison)
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.target in _RULES:
                with gm.graph.inserting_before(node):
                    result = _RULES[node.target](lowering, node)
                if result is not None:
                    node.replace_all_uses_with(result)
                    lowering.erased.append(node)
        for node in reversed(lowering.erased):
            gm.graph.erase_node(node)


def _all_gather(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    shard, _, world_size, group = node.args
    return lowering.call(_c10d.all_gather_into_tensor.default, shard, world_size, group, like=node)


def _join(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    return lowering.call(_aten.cat.default, node.args[0], like=node)


def _scale(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    """Sections that are scaled, as the program did it: from the dtype that it read, in float32."""
    shard: Any = node.args[0]
    names = ("begins", "ends", "scales", "most", "dtype")
    begins, ends, scales, bounds, dtype = (ops.argument(node, name) for name in names)

    def wide(begin: int, end: int) -> torch.fx.Node:
        return lowering.cast(lowering.section(shard, 0, begin, end, node), torch.float32, node)

    pieces = {}
    for begin, end, scale, most in zip(begins, ends, scales, bounds, strict=True):
        read = lowering.cast(lowering.section(shard, 0, begin, end, node), dtype, node)
        read = lowering.cast(read, torch.float32, node)
        if of_each := scale.meta["val"].shape:  # [rows, 1], or [1, columns]
            by_rows = [of_each[0], -1] if of_each[1] == 1 else [-1, of_each[1]]
            read = lowering.call(_aten.view.default, read, by_rows, like=node)
        scaled = lowering.call(_aten.mul.Tensor, read, scale, like=node)
        above = lowering.call(_aten.clamp_min.default, scaled, -most, like=node)
        found = lowering.call(_aten.clamp_max.default, above, most, like=node)
        pieces[begin] = lowering.call(_aten.view.default, found, [-1], like=node) if of_each else found
    return lowering.joined(pieces, shard.meta["val"].numel(), wide, node, dim=0)


def _all_to_all(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    packed, _, world_size, group = node.args
    sizes = [packed.meta["val"].numel() // world_size] * world_size  # type: ignore[union-attr,operator]
    return lowering.call(_c10d.all_to_all_single.default, packed, sizes, sizes, group, like=node)


def _all_gather_grouped(lowering: Lowering, node: torch.fx.Node) -> None:
    _, _, world_size, group = node.args
    outs = ops.parameters_of(node)
    shards = [lowering.stored(shard, node) for shard in ops.gathered_shards(node).values()]
    ends = list(accumulate(shard.meta["val"].numel() for shard in shards))
    slices = []
    for out in outs:
        offset = ops.argument(out, "offset")
        index = bisect_right(ends, offset)
        begin = offset - (ends[index - 1] if index else 0)
        end = begin + ops.taken_by(out)
        slices.append(lowering.section(shards[index], 0, begin, end, node))
    offsets = [ops.argument(out, "offset") for out in outs]
    target = _c10d.all_gather_into_tensor_coalesced.default
    _coalesced(lowering, node, offsets, target, slices, world_size, group)


def _reduce_scatter(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    packed, _, world_size, group, reduction = node.args
    return lowering.call(_c10d.reduce_scatter_tensor.default, packed, reduction, world_size, group, like=node)


def _reduce_scatter_grouped(lowering: Lowering, node: torch.fx.Node) -> None:
    names = ("gradients", "offsets", "world_size", "group", "dtype", "reduction")
    gradients, offsets, world_size, group, dtype, reduction = (ops.argument(node, name) for name in names)
    padded = [lowering.cast(lowering.padded_rows(gradient, world_size, node), dtype, node) for gradient in gradients]
    target = _c10d.reduce_scatter_tensor_coalesced.default
    _coalesced(lowering, node, offsets, target, padded, reduction, world_size, group)


def _coalesced(lowering: Lowering, node: torch.fx.Node, offsets: Any, target: Any, *args: Any) -> None:
    """One coalesced call; the waits for its results come where `_wait` finds the dialect's wait."""
    call = lowering.call(target, *args, like=node)
    results = [lowering.call(operator.getitem, call, index, like=node) for index in range(len(offsets))]
    lowering.pieces[node] = dict(zip(offsets, results, strict=True))
    lowering.erased.append(node)


def _all_reduce(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gradient, _, _, group, reduction = node.args
    return lowering.call(_c10d.all_reduce.default, gradient, reduction, group, like=node)


def _wait(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node | None:
    pending: Any = node.args[0]
    if pending.op == "placeholder":  # the caller's: what is returned is its memory
        return ops.call(lowering.graph, _c10d.wait_tensor.default, pending, like=node, value=pending.meta["val"])
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
    joined = lowering.joined(rows, numel, lowering.zeros(rows), node)
    _note_join(joined)
    return lowering.call(_aten.view.default, joined, [numel], like=node)


def _copy_out(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, offset, _, world_size, dtype, form = node.args
    if form is not None:
        return _in_shape(lowering, lower_forms.out_of_integers(lowering, node), node)
    if gathered in lowering.pieces:
        copied = lowering.copied(lowering.pieces[gathered][offset])  # type: ignore[index]
        chunks = lowering.call(ops.STORE, copied, like=node)  # Inductor takes a copy for the view that it copies
    else:
        if gathered not in lowering.by_rank:
            numel = gathered.meta["val"].numel() // world_size
            lowering.by_rank[gathered] = lowering.call(_aten.view.default, gathered, [world_size, numel], like=node)
        end = offset + ops.taken_by(node)  # type: ignore[operator]
        chunks = lowering.call(_aten.slice_copy.Tensor, lowering.by_rank[gathered], 1, offset, end, like=node)
    if dtype is not None:  # its bytes were sent
        chunks = lowering.call(_aten.view.dtype, chunks, dtype, like=node)
    return _in_shape(lowering, chunks, node)


def _view_out(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, offset, shape, world_size = node.args
    if gathered in lowering.pieces:
        return _in_shape(lowering, lowering.pieces[gathered][offset], node)  # type: ignore[index]
    if world_size == 1:
        gathered = lowering.section(gathered, 0, offset, offset + math.prod(shape), node)  # type: ignore[arg-type,operator]
    return _in_shape(lowering, gathered, node)


def _in_shape(lowering: Lowering, chunks: torch.fx.Node, node: torch.fx.Node) -> torch.fx.Node:
    """The parameter from its ranks' chunks, in order in `chunks`: padding of the last rows is cut off."""
    shape: Any = ops.argument(node, "shape")
    if not shape:
        return lowering.call(_aten.view.default, chunks, [], like=node)
    rows = ops.argument(node, "world_size") * shard_rows(shape, ops.argument(node, "world_size"))
    full = lowering.call(_aten.view.default, chunks, [rows, *shape[1:]], like=node)
    return lowering.section(full, 0, 0, shape[0], node)


def _pack(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    chunks = lowering.chunks(node)
    if ops.argument(node, "forms"):
        return lower_forms.pack_in_forms(lowering, node, chunks)
    numel, world_size, dtype = (ops.argument(node, name) for name in ("numel", "world_size", "dtype"))

    def kept(begin: int, end: int) -> torch.fx.Node:
        return lowering.cast(lowering.left(node, "accumulated", begin, end), dtype, node)

    gap = lowering.zeros(chunks) if ops.argument(node, "accumulated") is None else kept
    joined = lowering.joined(chunks, numel, gap, node)
    _note_join(joined)
    return lowering.call(_aten.view.default, joined, [world_size * numel], like=node)


def _note_join(joined: torch.fx.Node) -> None:
    """Note whether a buffer of pieces is copied, or something is computed on the way."""
    if ops.is_call(joined, _aten.cat.default):
        is_copy = all(map(_is_view, joined.args[0]))  # type: ignore[arg-type]
        (metadata.copy_whole if is_copy else metadata.note_pack)(joined)


def _is_view(chunk: torch.fx.Node) -> bool:
    """Whether nothing is computed between a gradient and its chunks, except for views."""
    while ops.is_call(chunk, _aten.view.default):
        (chunk,) = chunk.all_input_nodes
    return not ops.is_call(chunk, *_COMPUTED)


def _reshard(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, parts, index = node.args
    numel = gathered.meta["val"].numel() // parts
    copied = lowering.copied(lowering.section(gathered, 0, index * numel, (index + 1) * numel, node))  # type: ignore[operator]
    return lowering.call(ops.STORE, copied, like=node)  # Inductor takes a copy for the view that it copies


def _cast(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    value: Any
    value, dtype = node.args
    return lowering.cast(value, dtype, node)


def _divide(lowering: Lowering, node: torch.fx.Node) -> torch.fx.Node:
    return lowering.call(_aten.div.Tensor, *node.args, like=node)


def _free(lowering: Lowering, node: torch.fx.Node) -> None:
    freed: Any = node.args[0]
    if lowering.poison:
        for buffer in lowering.pieces[freed].values() if freed in lowering.pieces else [freed]:
            lowering.call(ops.POISON, buffer, like=node)
    lowering.erased.append(node)


_RULES: dict[Any, Any] = {
    ops.NARROW: lower_forms.narrow,
    ops.JOIN: _join,
    ops.SCALE: _scale,
    ops.ALL_GATHER: _all_gather,
    ops.ALL_GATHER_GROUPED: _all_gather_grouped,
    ops.REDUCE_SCATTER: _reduce_scatter,
    ops.REDUCE_SCATTER_GROUPED: _reduce_scatter_grouped,
    ops.ALL_REDUCE: _all_reduce,
    ops.ALL_TO_ALL: _all_to_all,
    ops.ALL_GATHER_SUMS: _all_gather,
    ops.SUM_UP: lower_forms.sum_up,
    ops.WAIT: _wait,
    ops.COPY_OUT: _copy_out,
    ops.VIEW_OUT: _view_out,
    ops.RESHARD: _reshard,
    ops.PACK: _pack,
    ops.REMAINDER: lower_forms.remainder,
    ops.CAST: _cast,
    ops.DIVIDE: _divide,
    ops.FREE: _free,
}
