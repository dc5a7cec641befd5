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
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.fx

from . import forms, metadata, ops
from .errors import refuse_calls, refuse_unplaced

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_COMPUTED = (  # what is made of a gradient on its way into a bucket, and where none stands
    _aten.add.Tensor,
    _aten.clone.default,
    _aten.constant_pad_nd.default,
    _aten.full.default,
    torch.ops.prims.convert_element_type.default,
)


Gap = Callable[[int, int], torch.fx.Node]
"""What stands in [begin, end) of a shard where no piece does."""


@dataclasses.dataclass(frozen=True)
class LowerCollectives:
    poison: bool = dataclasses.field(default=False, metadata={"for": "debugging"})

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_unplaced(gm.graph)
        refuse_calls(gm.graph, ops.MOVE, until="OverlapCopies")
        lowering = _Lowering(gm.graph, self.poison)
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
        return self._copy(node)

    def _copy(self, node: torch.fx.Node) -> torch.fx.Node:
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
        missing = ops.shard_numel(value.shape, world_size) * world_size - value.numel()
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
            taken = ops.shard_numel(value.shape, world_size)
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

    def joined(self, pieces: dict[int, torch.fx.Node], numel: int, gap: Gap, like: torch.fx.Node) -> torch.fx.Node:
        """A [rows, numel] tensor with every [rows, n] piece at its offset; `gap(begin, end)` fills the rest."""
        parts: list[torch.fx.Node] = []
        filled = 0
        for offset, piece in sorted(pieces.items()):
            if offset > filled:
                parts.append(gap(filled, offset))
            parts.append(piece)
            filled = offset + piece.meta["val"].shape[1]
        if numel > filled:
            parts.append(gap(filled, numel))
        return parts[0] if len(parts) == 1 else self.call(_aten.cat.default, parts, 1, like=like)

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


def _all_gather(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    shard, _, world_size, group = node.args
    return lowering.call(_c10d.all_gather_into_tensor.default, shard, world_size, group, like=node)


def _join(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    return lowering.call(_aten.cat.default, node.args[0], like=node)


def _narrow(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    shard: Any = node.args[0]
    pieces = []
    for region in _joined_regions(ops.regions(node)):
        piece = lowering.section(shard, 0, region.begin, region.end, node)
        pieces += lowering.message(piece, [], region, node)
    return lowering.call(_aten.cat.default, pieces, like=node)


def _joined_regions(regions: list[forms.Region]) -> list[forms.Region]:
    """The same, those as one that lie side by side in one dtype."""
    found: list[forms.Region] = []
    for region in regions:
        last = found[-1] if found and not forms.is_integers(region.form) else None
        if last is not None and (last.end, last.form) == (region.begin, region.form):
            found[-1] = dataclasses.replace(last, end=region.end)
        else:
            found.append(region)
    return found


def _sum_up(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    received: Any = node.args[0]
    numel, world_size, dtype = (ops.argument(node, name) for name in ("numel", "world_size", "dtype"))
    call, sent_as, begin = partial(lowering.call, like=node), received.meta["val"].dtype, 0
    by_rank = call(_aten.view.default, received, [world_size, received.meta["val"].numel() // world_size])
    pieces, is_mean = {}, ops.argument(node, "reduction") == "avg"
    for region, size in zip(ops.regions(node), forms.sizes(ops.regions(node), sent_as), strict=True):
        piece = lowering.section(by_rank, 1, begin, begin + size, node)
        if not forms.is_integers(region.form) and (form := forms.dtype_of_name(region.form)) != sent_as:
            piece = call(_aten.view.dtype, lowering._copy(piece), form)
        values = forms.out_of_form(call, piece, [world_size], region, dtype)
        total = call(_aten.sum.dim_IntList, values, [0], True)
        pieces[region.begin] = call(_aten.div.Tensor, total, float(world_size)) if is_mean else total
        begin += size
    joined = lowering.joined(pieces, numel, lowering.zeros(pieces), node)
    return call(_aten.view.default, joined, [numel])


def _all_to_all(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    packed, _, world_size, group = node.args
    sizes = [packed.meta["val"].numel() // world_size] * world_size  # type: ignore[union-attr,operator]
    return lowering.call(_c10d.all_to_all_single.default, packed, sizes, sizes, group, like=node)


def _all_gather_grouped(lowering: _Lowering, node: torch.fx.Node) -> None:
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


def _reduce_scatter(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    packed, _, world_size, group, reduction = node.args
    return lowering.call(_c10d.reduce_scatter_tensor.default, packed, reduction, world_size, group, like=node)


def _reduce_scatter_grouped(lowering: _Lowering, node: torch.fx.Node) -> None:
    names = ("gradients", "offsets", "world_size", "group", "dtype", "reduction")
    gradients, offsets, world_size, group, dtype, reduction = (ops.argument(node, name) for name in names)
    padded = [lowering.cast(lowering.padded_rows(gradient, world_size, node), dtype, node) for gradient in gradients]
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
    joined = lowering.joined(rows, numel, lowering.zeros(rows), node)
    _note_join(joined)
    return lowering.call(_aten.view.default, joined, [numel], like=node)


def _copy_out(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, offset, _, world_size, dtype, form = node.args
    if form is not None:
        return _in_shape(lowering, _out_of_integers(lowering, node), node)
    if gathered in lowering.pieces:
        copied = lowering._copy(lowering.pieces[gathered][offset])  # type: ignore[index]
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


def _out_of_integers(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    """The chunks of a parameter that was sent as blocks of integers, in memory, as [world_size, elements]."""
    gathered: Any = node.args[0]
    names = ("offset", "shape", "world_size", "dtype", "form")
    offset, shape, world_size, dtype, form = (ops.argument(node, name) for name in names)
    call, taken = partial(lowering.call, like=node), ops.taken_by(node)
    if gathered in lowering.pieces:
        message = call(_aten.view.default, lowering.pieces[gathered][offset], [world_size, taken])
    else:
        numel = gathered.meta["val"].numel() // world_size
        by_rank = call(_aten.view.default, gathered, [world_size, numel])
        message = lowering.section(by_rank, 1, offset, offset + taken, node)
    region = forms.Region(0, ops.shard_numel(shape, world_size), math.prod(shape[1:]), form)
    found: torch.fx.Node = forms.out_of_form(call, message, [world_size], region, dtype, store=partial(call, ops.STORE))
    return found


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
    chunks = lowering.chunks(node)
    if ops.argument(node, "forms"):
        return _pack_in_forms(lowering, node, chunks)
    numel, world_size, dtype = (ops.argument(node, name) for name in ("numel", "world_size", "dtype"))

    def kept(begin: int, end: int) -> torch.fx.Node:
        return lowering.cast(lowering.left(node, "accumulated", begin, end), dtype, node)

    gap = lowering.zeros(chunks) if ops.argument(node, "accumulated") is None else kept
    joined = lowering.joined(chunks, numel, gap, node)
    _note_join(joined)
    return lowering.call(_aten.view.default, joined, [world_size * numel], like=node)


def _pack_in_forms(lowering: _Lowering, node: torch.fx.Node, chunks: dict[int, torch.fx.Node]) -> torch.fx.Node:
    world_size, pieces = ops.argument(node, "world_size"), []
    for region in ops.regions(node):
        chunk = chunks.get(region.begin)
        if chunk is None:
            chunk = lowering.left(node, "accumulated", region.begin, region.end)
        missing = region.end - region.begin - chunk.meta["val"].shape[1]
        if missing:
            chunk = lowering.call(_aten.constant_pad_nd.default, chunk, [0, missing], like=node)
        if ops.argument(node, "residual") is not None and forms.is_integers(region.form):
            blocks = _with_residual(lowering, node, chunk, region)
            pieces += forms.message_of(partial(lowering.call, like=node), blocks)
            lowering.blocks[region.begin, ops.argument(node, "gradients")[0]] = blocks
        else:
            pieces += lowering.message(chunk, [world_size], region, node)
    joined = lowering.call(_aten.cat.default, pieces, 1, like=node)
    return lowering.call(_aten.view.default, joined, [node.meta["val"].numel()], like=node)


def _with_residual(
    lowering: _Lowering, node: torch.fx.Node, chunk: torch.fx.Node, region: forms.Region
) -> forms.Blocks:
    """What is sent of a gradient and of what earlier messages have lost of it."""
    wide = torch.promote_types(chunk.meta["val"].dtype, torch.float32)
    left = lowering.cast(lowering.left(node, "residual", region.begin, region.end), wide, node)
    total = lowering.call(_aten.add.Tensor, lowering.cast(chunk, wide, node), left, like=node)
    lead = [ops.argument(node, "world_size")]
    return forms.Blocks.of(partial(lowering.call, like=node), total, lead, region, wide)


def _remainder(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    """From the blocks that the message was made of, before this; the residual stays where nothing is lost."""
    residual, first = ops.argument(node, "residual").meta["val"], ops.argument(node, "gradients")[0]
    lost = {}
    for region in filter(lambda region: forms.is_integers(region.form), ops.regions(node)):
        blocks = lowering.blocks[region.begin, first]
        lost[region.begin] = lowering.cast(
            forms.lost_of(partial(lowering.call, like=node), blocks), residual.dtype, node
        )
    joined = lowering.joined(lost, ops.argument(node, "numel"), partial(lowering.left, node, "residual"), node)
    return lowering.call(_aten.view.default, joined, [residual.numel()], like=node)


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


def _reshard(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    gathered: Any
    gathered, _, parts, index = node.args
    numel = gathered.meta["val"].numel() // parts
    copied = lowering._copy(lowering.section(gathered, 0, index * numel, (index + 1) * numel, node))  # type: ignore[operator]
    return lowering.call(ops.STORE, copied, like=node)  # Inductor takes a copy for the view that it copies


def _cast(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    value: Any
    value, dtype = node.args
    return lowering.cast(value, dtype, node)


def _divide(lowering: _Lowering, node: torch.fx.Node) -> torch.fx.Node:
    return lowering.call(_aten.div.Tensor, *node.args, like=node)


def _free(lowering: _Lowering, node: torch.fx.Node) -> None:
    freed: Any = node.args[0]
    if lowering.poison:
        for buffer in lowering.pieces[freed].values() if freed in lowering.pieces else [freed]:
            lowering.call(ops.POISON, buffer, like=node)
    lowering.erased.append(node)


_RULES: dict[Any, Any] = {
    ops.NARROW: _narrow,
    ops.JOIN: _join,
    ops.ALL_GATHER: _all_gather,
    ops.ALL_GATHER_GROUPED: _all_gather_grouped,
    ops.REDUCE_SCATTER: _reduce_scatter,
    ops.REDUCE_SCATTER_GROUPED: _reduce_scatter_grouped,
    ops.ALL_REDUCE: _all_reduce,
    ops.ALL_TO_ALL: _all_to_all,
    ops.SUM_UP: _sum_up,
    ops.WAIT: _wait,
    ops.COPY_OUT: _copy_out,
    ops.VIEW_OUT: _view_out,
    ops.RESHARD: _reshard,
    ops.PACK: _pack,
    ops.REMAINDER: _remainder,
    ops.CAST: _cast,
    ops.DIVIDE: _divide,
    ops.FREE: _free,
}
