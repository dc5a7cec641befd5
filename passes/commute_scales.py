"""Commute scales: a parameter that the program only scales and casts to float8 is gathered in float8.

    Before   w = unshard(shard): f32; s = f(max(abs(w))); q = convert(clamp(mul(t(w), s), -448, 448), f8)
    After    m = wait(all_reduce(amax(abs(slice(shard))), max)); s = f(m); q = t(unshard(scale(shard, s)): f8)
    Needs    one unshard per parameter (merge_unshards), none of which is a gather yet
    Keeps    every value to the last bit: the largest element is the largest of those of the parts, whose padding is 0,
             and it is the same whether elements are scaled, clamped and cast before they are put together or after
    Cost     O(nodes); at the top of each half a small all-reduce, and a small gather of the scales of rows or blocks

Float8 training by torchao makes such programs (`scaled_reads`). Scales are computed from whole weights, in the forward
and, where a weight is gathered again, in the backward. Maxima of whole weights and of columns are reduced. Rows are
whole on their ranks, and so are equal blocks of a row: each rank computes the scales of its own, and all gather what
the program reads of these, such as the exponents of MXFP8. What else a unit holds travels in the same message as
before.

A parameter stays wide where anything else reads it, such as the backward that it is kept for. So does a bucket that
would not lose a quarter of its bytes, one of which a part is kept for the backward, and one whose shard is not on the
device of the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
import torch.fx

from . import analysis, metadata, ops
from .merge_unshards import refuse_repeated_unshards
from .scaled_reads import ScaledRead, by, is_reshape, scaled_reads

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


@dataclasses.dataclass(frozen=True)
class CommuteScales:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        graph = gm.graph
        refuse_repeated_unshards(graph)
        if not (reads := list(scaled_reads(graph))):
            return
        top = next(node for node in graph.nodes if node.op != "placeholder")
        scale_of_shard: dict[torch.fx.Node, torch.fx.Node] = {}
        with graph.inserting_before(top):
            for same in by(reads, _message):
                compute = _gather_scales if same[0].along == "rows" else _reduce_maxima
                scale_of_shard |= compute(graph, same, top)
        for same in by(reads, lambda read: ops.argument(read.unshard, "shard")):
            _scale_shard(graph, same, scale_of_shard)
        analysis.erase_dead(graph)


def _message(read: ScaledRead) -> tuple[object, ...]:
    """What maxima or scales have in common that are sent together."""
    dtype = read.read.meta["val"].dtype if read.along == "rows" else read.wide
    return ops.argument(read.unshard, "group"), read.along == "rows", dtype


def _magnitudes(graph: torch.fx.Graph, read: ScaledRead) -> torch.fx.Node:
    """The absolute values of a rank's part of a parameter, by rows where these or columns have scales of their own."""
    part = ops.call(graph, _aten.slice.Tensor, ops.argument(read.unshard, "shard"), 0, *read.section)
    if part.meta["val"].dtype != read.wide:
        part = ops.call(graph, torch.ops.prims.convert_element_type.default, part, read.wide)
    if read.along != "tensor":
        part = ops.call(graph, _aten.view.default, part, [read.num_rows, -1])
    return ops.call(graph, _aten.abs.default, part)


def _reduce_maxima(
    graph: torch.fx.Graph, reads: list[ScaledRead], top: torch.fx.Node
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Insert the maxima of shards, an all-reduce of all of them, and the scales; these, by what reads the shard."""
    maxima = [
        ops.call(graph, _aten.amax.default, _magnitudes(graph, read), [0], read.along == "tensor") for read in reads
    ]
    sent = ops.call(graph, _aten.cat.default, maxima)
    group = ops.argument(reads[0].unshard, "group")
    pending = ops.call(graph, _c10d.all_reduce.default, sent, "max", group, value=sent.meta["val"])
    of_all = ops.call(graph, _c10d.wait_tensor.default, pending, value=sent.meta["val"])
    begin = 0
    for read, of_part in zip(reads, maxima, strict=True):
        end = begin + of_part.meta["val"].numel()
        if read.along == "tensor":
            largest = ops.call(graph, _aten.select.int, of_all, 0, begin)
        else:
            columns = ops.call(graph, _aten.slice.Tensor, of_all, 0, begin, end)
            largest = ops.call(graph, _aten.view.default, columns, list(read.maxima[0].meta["val"].shape))
        for maximum in read.maxima:
            maximum.replace_all_uses_with(largest)
        begin = end
    for read in reads:
        for node in read.chain:
            top.prepend(node)
    return {
        read.unshard: read.scale
        if read.along == "tensor"
        else ops.call(graph, _aten.view.default, read.scale, [1, read.scale.meta["val"].numel()])
        for read in reads
    }


def _gather_scales(
    graph: torch.fx.Graph, reads: list[ScaledRead], _: torch.fx.Node
) -> dict[torch.fx.Node, torch.fx.Node]:
    """Insert the scales of a rank's own rows, or of their blocks, and a gather of what is read of them.

    Returns:
        The scales, by what reads the shard.
    """
    own: list[torch.fx.Node] = []
    scale_of_shard = {}
    for read in reads:
        copy_of = dict.fromkeys(read.maxima, ops.call(graph, _aten.amax.default, _magnitudes(graph, read), [1]))
        for node in read.chain:
            is_same = is_reshape(node)  # one number for each row
            copy_of[node] = copy_of[node.all_input_nodes[0]] if is_same else analysis.copied(graph, node, copy_of)
        own.append(copy_of[read.read])
        scale_of_shard[read.unshard] = ops.call(graph, _aten.view.default, copy_of[read.scale], [read.num_rows, 1])
    sent = ops.call(graph, _aten.cat.default, own)
    value, (ranks, group) = sent.meta["val"], (ops.argument(reads[0].unshard, name) for name in ("world_size", "group"))
    gathered = value.new_empty(ranks * value.numel())
    pending = ops.call(graph, _c10d.all_gather_into_tensor.default, sent, ranks, group, value=gathered)
    of_all = ops.call(graph, _c10d.wait_tensor.default, pending, value=gathered)
    by_rank = ops.call(graph, _aten.view.default, of_all, [ranks, value.numel()])
    begin = 0
    for read in reads:
        end = begin + read.num_rows
        rows = ops.call(graph, _aten.slice_copy.Tensor, by_rank, 1, begin, end)
        flat = ops.call(graph, _aten.view.default, rows, [ranks * read.num_rows])
        value = read.read.meta["val"]
        of_rows = ops.call(graph, _aten.slice.Tensor, flat, 0, 0, value.numel())
        read.read.replace_all_uses_with(ops.call(graph, _aten.view.default, of_rows, list(value.shape)))
        begin = end
    return scale_of_shard


def _scale_shard(
    graph: torch.fx.Graph, reads: list[ScaledRead], scale_of_shard: Mapping[torch.fx.Node, torch.fx.Node]
) -> None:
    """Have everything that is read of a shard be read of the scaled shard, in float8 what that is for."""
    shard, bucket = (ops.argument(reads[0].unshard, name) for name in ("shard", "bucket"))
    unshards = [node for node in shard.users if ops.is_call(node, ops.UNSHARD)]
    begins, ends = zip(*(read.section for read in reads), strict=True)
    scales, most = [scale_of_shard[read.unshard] for read in reads], [read.most for read in reads]
    with graph.inserting_before(min(unshards)):
        scaled = ops.call(graph, ops.SCALE, shard, scales, bucket, list(begins), list(ends), most, reads[0].wide)
    for unshard in unshards:
        ops.set_argument(unshard, "shard", scaled)
    for read in reads:
        ops.set_argument(read.unshard, "dtype", read.dtype)
        value = read.unshard.meta["val"]
        metadata.describe(read.unshard, value.new_empty(value.shape, dtype=read.dtype), like=read.unshard)
        for view in analysis.aliases(read.unshard):
            if view is not read.unshard:
                args = torch.fx.map_arg(view.args, lambda node: node.meta["val"])
                metadata.describe(view, view.target(*args), like=view)  # type: ignore[operator]
        for view, casts in read.cast_of_view.items():
            for cast in casts:
                cast.replace_all_uses_with(view)
