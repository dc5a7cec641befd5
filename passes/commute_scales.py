"""Commute scales: a parameter that the program only scales and casts to float8 is gathered in float8.

    Before   w = unshard(shard): f32; s = f(max(abs(w))); q = convert(clamp(mul(t(w), s), -448, 448), f8)
    After    m = wait(all_reduce(amax(abs(slice(shard))), max)); s = f(m); q = t(unshard(scale(shard, s)): f8)
    Needs    one unshard per parameter (merge_unshards), none of which is a gather yet
    Keeps    every value to the last bit: the largest element is the largest of those of the parts, whose padding is 0,
             and it is the same whether elements are scaled, clamped and cast before they are put together or after
    Cost     O(nodes); one small all-reduce at the top of each half, for all of these parameters

Float8 training by torchao with a scale for each tensor makes such programs. Scales are computed from whole weights, in
the forward and, where a weight is gathered again, in the backward. What else a unit holds travels in the same message.

A parameter stays wide where anything else reads it: one that is kept for the backward, or has a scale for each row. So
does a bucket that would not lose a quarter of its bytes, and one whose shard is not on the device of the computation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.fx

from . import analysis, forms, metadata, ops
from .commute_casts import CASTS, loses_enough
from .merge_unshards import refuse_repeated_unshards
from .padding import shard_numel

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_T = TypeVar("_T")
_VIEWS = (_aten.permute.default, _aten.t.default, _aten.transpose.int)


@dataclasses.dataclass(frozen=True)
class CommuteScales:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        graph = gm.graph
        refuse_repeated_unshards(graph)
        if not (reads := list(scaled_reads(graph))):
            return
        top = next(node for node in graph.nodes if node.op != "placeholder")
        for same in _by(reads, lambda read: (ops.argument(read.unshard, "group"), read.wide)):
            _reduce_maxima(graph, same, top)
        for same in _by(reads, lambda read: ops.argument(read.unshard, "shard")):
            _scale_shard(graph, same)
        analysis.erase_dead(graph)


@dataclasses.dataclass(frozen=True)
class ScaledRead:
    """A parameter that is only scaled, clamped to [-most, most], and cast.

    Attributes:
        maxima: of the absolute values of all its elements.
        scalars: what is computed from those, up to the scale.
        cast_of_view: the results, by the view of the parameter that they are of.
    """

    unshard: torch.fx.Node
    maxima: list[torch.fx.Node]
    scalars: list[torch.fx.Node]
    most: float
    cast_of_view: dict[torch.fx.Node, list[torch.fx.Node]]

    @property
    def scale(self) -> torch.fx.Node:
        return self.scalars[-1]

    @property
    def wide(self) -> torch.dtype:
        """That it is gathered in otherwise."""
        found: torch.dtype = self.unshard.meta["val"].dtype
        return found

    @property
    def dtype(self) -> torch.dtype:
        first: torch.dtype = next(iter(self.cast_of_view.values()))[0].meta["val"].dtype
        return first

    @property
    def section(self) -> tuple[int, int]:
        """Where in the shard it begins and ends."""
        begin, shape, ranks = (ops.argument(self.unshard, name) for name in ("offset", "shape", "world_size"))
        return begin, begin + shard_numel(shape, ranks)


def scaled_reads(graph: torch.fx.Graph) -> Iterator[ScaledRead]:
    """The parameters that are to be gathered in float8."""
    unshards = [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) and node.users]
    for of_bucket in _by(unshards, lambda node: ops.argument(node, "shard")):
        reads = [read for unshard in of_bucket if (read := _scaled_read(unshard)) is not None]
        best = max(_by(reads, lambda read: read.wide), key=_num_saved, default=[])
        if loses_enough(_num_saved(best), of_bucket):
            yield from best


def _num_saved(reads: Sequence[ScaledRead]) -> int:
    """Bytes that gathers of full parameters would not carry."""
    return sum(int(read.unshard.meta["val"].numel()) * (read.wide.itemsize - 1) for read in reads)


def _scaled_read(unshard: torch.fx.Node) -> ScaledRead | None:
    shard, value = ops.argument(unshard, "shard"), unshard.meta["val"]
    is_whole = ops.argument(unshard, "world_size") == 1 or metadata.kept_part(shard) is not None
    is_elsewhere = shard.meta["val"].device != value.device
    is_double = shard.meta["val"].dtype.itemsize > torch.float32.itemsize  # others of the shard would lose bits
    if is_whole or is_elsewhere or is_double or ops.argument(unshard, "gather_form"):
        return None
    maxima: list[torch.fx.Node] = []
    found: list[tuple[torch.fx.Node, float, torch.dtype]] = []
    cast_of_view: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    views = [unshard]
    for view in views:
        for user in view.users:
            if ops.is_call(user, *_VIEWS):
                views.append(user)
            elif ops.is_call(user, _aten.abs.default) and {each.target for each in user.users} == {_aten.max.default}:
                maxima += user.users
            elif (scaled := _scaled_cast(view, user)) is not None:
                scale, most, cast = scaled
                found.append((scale, most, cast.meta["val"].dtype))
                cast_of_view.setdefault(view, []).append(cast)
            else:
                return None
    if len(set(found)) != 1 or (scalars := _scalars(found[0][0], maxima)) is None:
        return None
    return ScaledRead(unshard, maxima, scalars, found[0][1], cast_of_view)


def _scaled_cast(view: torch.fx.Node, user: torch.fx.Node) -> tuple[torch.fx.Node, float, torch.fx.Node] | None:
    """The scale, the bound, and the result, where `user` begins to scale and cast this value; None if it does not."""
    source, node = view, user
    if _is_cast_to(node, torch.float32):
        source, node = node, _only_user(node)
    if not ops.is_call(node, _aten.mul.Tensor) or source not in node.args:
        return None
    scale = node.args[1] if node.args[0] is source else node.args[0]
    is_scalar = isinstance(scale, torch.fx.Node) and scale.meta["val"].dim() == 0
    if not is_scalar or node.meta["val"].dtype != torch.float32:
        return None
    bounds, node = _bounds(_only_user(node))
    if bounds is None or bounds[0] != -bounds[1]:
        return None
    value = node.meta["val"]
    is_cast = ops.is_call(node, *CASTS) and forms.is_float8(value.dtype)
    if not is_cast or value.stride() != view.meta["val"].stride():
        return None
    return scale, bounds[1], node  # type: ignore[return-value]


def _bounds(node: torch.fx.Node) -> tuple[tuple[float, float] | None, torch.fx.Node]:
    """What a clamp that begins here, in one node or in two, clamps to, and what reads its result."""
    if ops.is_call(node, _aten.clamp.default) and len(node.args) == 3:
        return (float(node.args[1]), float(node.args[2])), _only_user(node)  # type: ignore[arg-type]
    above = _only_user(node)
    if ops.is_call(node, _aten.clamp_min.default) and ops.is_call(above, _aten.clamp_max.default):
        return (float(node.args[1]), float(above.args[1])), _only_user(above)  # type: ignore[arg-type]
    return None, node


def _only_user(node: torch.fx.Node) -> torch.fx.Node:
    """What reads this, if that is one; the node itself, which nothing that is asked for is, if not."""
    return next(iter(node.users)) if len(node.users) == 1 else node


def _is_cast_to(node: torch.fx.Node, dtype: torch.dtype) -> bool:
    return ops.is_call(node, *CASTS) and node.meta["val"].dtype == dtype


def _scalars(scale: torch.fx.Node, maxima: list[torch.fx.Node]) -> list[torch.fx.Node] | None:
    """What computes the scale from these maxima alone, in order; None if it needs anything else."""
    found: set[torch.fx.Node] = set()
    sources = [scale]
    for node in sources:
        if node in maxima or node in found:
            continue
        is_computed = node.op == "call_function" and node.all_input_nodes and not analysis.is_random(node)
        if not is_computed or ops.is_functional(node) or node.meta["val"].dim() > 0:
            return None
        found.add(node)
        sources += node.all_input_nodes
    return sorted(found) or None


def _by(values: Sequence[_T], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """The values in lists of those with an equal key, in the order of the first."""
    found: dict[Hashable, list[_T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return list(found.values())


def _reduce_maxima(graph: torch.fx.Graph, reads: list[ScaledRead], top: torch.fx.Node) -> None:
    """At the top, compute the maxima of shards, one all-reduce of all of them, and the scales."""
    with graph.inserting_before(top):
        largest = []
        for read in reads:
            part = ops.call(graph, _aten.slice.Tensor, ops.argument(read.unshard, "shard"), 0, *read.section)
            if part.meta["val"].dtype != read.wide:
                part = ops.call(graph, torch.ops.prims.convert_element_type.default, part, read.wide)
            largest.append(ops.call(graph, _aten.amax.default, ops.call(graph, _aten.abs.default, part), [0], True))
        sent = ops.call(graph, _aten.cat.default, largest)
        group = ops.argument(reads[0].unshard, "group")
        pending = ops.call(graph, _c10d.all_reduce.default, sent, "max", group, value=sent.meta["val"])
        of_all = ops.call(graph, _c10d.wait_tensor.default, pending, value=sent.meta["val"])
        for index, read in enumerate(reads):
            largest_of_all = ops.call(graph, _aten.select.int, of_all, 0, index)
            for maximum in read.maxima:
                maximum.replace_all_uses_with(largest_of_all)
    for read in reads:
        for node in read.scalars:
            top.prepend(node)


def _scale_shard(graph: torch.fx.Graph, reads: list[ScaledRead]) -> None:
    """Have everything that is read of a shard be read of the scaled shard, in float8 what that is for."""
    shard, bucket = (ops.argument(reads[0].unshard, name) for name in ("shard", "bucket"))
    unshards = [node for node in shard.users if ops.is_call(node, ops.UNSHARD)]
    begins, ends = zip(*(read.section for read in reads), strict=True)
    scales, most = [read.scale for read in reads], [read.most for read in reads]
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
