"""Insert all-gathers: each bucket is gathered once, and each of its parameters taken out just before its first use.

    Before   w = unshard(shard); v = unshard(shard); ...; mm(x, t(w)); ...; mm(y, t(v))
    After    g = wait(all_gather(shard)); ...; w = copy_out(g); mm(x, t(w)); ...; v = copy_out(g); mm(y, t(v))
    Needs    one unshard per parameter (merge_unshards)
    Keeps    data flow; the order of the nodes, but views and casts of parameters move down to where they are read
    Cost     O(nodes), one all-gather per bucket, or per gather of the plan

The packed form copies each parameter out of the gathered buffer, except where the bucket holds a single one: its
chunks already lie one after another. In the grouped form every parameter is gathered into its place and only viewed.
A bucket that is not sharded (`world_size` 1) needs no gather. A shard is moved to the device and cast to the dtype of
the computation before it is gathered. A part of the gathered buffer that is kept for the backward is copied at once.

Where a part of a bucket's parameters is wanted in a narrower dtype than the others (commute_casts), all are sent in one
message of that dtype, the others as their bytes. Where parameters are to be sent as blocks of integers (`forms`), the
message is bytes. What is sent in another form is copied out of the buffer, whether that is packed or grouped.

What was gathered for several calls, before this one, is only waited for, and viewed: each parameter by itself.

A plan has several buckets gathered at once, and selects the form for each gather. In the packed form their shards are
first joined to one. What is gathered at once is of one group, dtype and device.

The wait stands before the kernel that a compiler will form around the first use: where that is a light operator, after
the last heavy one (a matmul, say) before it. A wait amid a run of light operators would cut their kernel into two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.fx

from . import analysis, forms, metadata, ops
from .errors import pass_error
from .merge_unshards import refuse_repeated_unshards
from .padding import shard_numel
from .plan import Gather


@dataclasses.dataclass(frozen=True)
class InsertAllGather:
    """`grouped` selects the form of the gathers that are not in `plan`; see the module's text."""

    grouped: bool = False
    plan: tuple[Gather, ...] = ()

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_repeated_unshards(gm.graph)
        _sink_parameter_values(gm.graph)
        _take_gathered(gm.graph)
        found = gathered_buckets(gm.graph)
        for bucket in found:
            if bucket.is_parted and bucket.dtype == forms.MESSAGE:
                raise pass_error(f"a part of {bucket.name} is kept, which is sent as integers", bucket.first_use)
            if bucket.world_size == 1:
                _cast_alone(gm.graph, bucket)
        for buckets, is_grouped in self._gathers([bucket for bucket in found if bucket.world_size > 1]):
            if len(buckets) == 1:
                _gather_one(gm.graph, buckets[0], is_grouped and not buckets[0].is_parted)
            else:
                _gather_together(gm.graph, buckets, is_grouped)
        analysis.erase_dead(gm.graph)

    def _gathers(self, buckets: list[GatheredBucket]) -> list[tuple[list[GatheredBucket], bool]]:
        """What is gathered at once, and whether grouped, in the order of first use."""
        planned = {bucket: gather for gather in self.plan for bucket in gather.buckets}
        found: dict[Gather, list[GatheredBucket]] = {}
        for bucket in buckets:
            alone = Gather((bucket.name,), self.grouped, None)
            found.setdefault(planned.get(bucket.name, alone), []).append(bucket)
        return [(together, gather.is_grouped) for gather, together in found.items()]


def _take_gathered(graph: torch.fx.Graph) -> None:
    """Take each parameter that was gathered before this call out of what was, as late as it is needed."""
    position = analysis.positions(graph)
    for unshard in graph.find_nodes(op="call_function", target=ops.UNSHARD):
        gathered = ops.argument(unshard, "gathered")
        if gathered is None or not unshard.users:
            continue
        shard, bucket = (ops.argument(unshard, name) for name in ("shard", "bucket"))
        metadata.note_gathered(shard, bucket)
        parameter, shape, world_size = (ops.argument(unshard, name) for name in ("parameter", "shape", "world_size"))
        with graph.inserting_before(analysis.kernel_begin(analysis.first_use(unshard, position))):
            ready = ops.call(graph, ops.WAIT, gathered, value=gathered.meta["val"])
            full = ops.call(graph, ops.VIEW_OUT, ready, parameter, 0, shape, world_size, like=unshard)
        unshard.replace_all_uses_with(full)


def _cast_alone(graph: torch.fx.Graph, bucket: GatheredBucket) -> None:
    """What is not sharded is cast and viewed, once for each dtype that is wanted."""
    for same in bucket.by_dtype():
        with graph.inserting_before(analysis.kernel_begin(same.first_use)):
            buffer = _converted(graph, same)
        _take_out(graph, same, buffer, is_view=True, offset=0)


def _gather_one(graph: torch.fx.Graph, bucket: GatheredBucket, is_grouped: bool) -> None:
    with graph.inserting_before(_place(graph, bucket.first_use)):
        buffer = _gathered(graph, [_converted(graph, bucket)], bucket.name, bucket, is_grouped)
        for part in bucket.parts:
            arguments = [ops.argument(part, name) for name in ("bucket", "parts", "index")]
            part.replace_all_uses_with(ops.call(graph, ops.RESHARD, buffer, *arguments, like=part))
    _take_out(graph, bucket, buffer, is_view=is_grouped or bucket.holds_one_parameter, offset=0)


def _gather_together(graph: torch.fx.Graph, buckets: list[GatheredBucket], is_grouped: bool) -> None:
    """One all-gather of several buckets."""
    first = buckets[0]
    for bucket in buckets:
        if bucket.kind != first.kind:
            unshard = next(iter(bucket.first_use_of_unshard))
            message = f"{bucket.name} is of another group, dtype or device than {first.name}: gather each by itself"
            raise pass_error(message, unshard)
    name = ops.name_of_buckets([bucket.name for bucket in buckets])
    with graph.inserting_before(_place(graph, first.first_use)):
        shards = [_converted(graph, bucket) for bucket in buckets]
        if not is_grouped:
            shards = [ops.call(graph, ops.JOIN, shards, name)]
        buffer = _gathered(graph, shards, name, first, is_grouped)
    offset = 0
    for bucket in buckets:
        _take_out(graph, bucket, buffer, is_view=is_grouped, offset=offset)
        offset += bucket.sent_numel


def _place(graph: torch.fx.Graph, first_use: torch.fx.Node) -> torch.fx.Node:
    """Before what to gather: the kernel that needs it, or what is behind all scales, which are at the top."""
    begin = analysis.kernel_begin(first_use)
    scaled = graph.find_nodes(op="call_function", target=ops.SCALE)
    last = max((scale for node in scaled for scale in node.all_input_nodes[1:]), default=None)
    return begin if last is None or last < begin else last.next


def _gathered(
    graph: torch.fx.Graph, shards: list[torch.fx.Node], name: str, like: GatheredBucket, is_grouped: bool
) -> torch.fx.Node:
    """The gathered buffer, ready."""
    gather, sent = (ops.ALL_GATHER_GROUPED, shards) if is_grouped else (ops.ALL_GATHER, shards[0])
    pending = ops.call(graph, gather, sent, name, like.num_gathered, like.group)
    return ops.call(graph, ops.WAIT, pending, value=pending.meta["val"])


def _take_out(
    graph: torch.fx.Graph, bucket: GatheredBucket, buffer: torch.fx.Node, *, is_view: bool, offset: int
) -> None:
    """Take every parameter of the bucket, which begins at `offset` of each rank's part of the buffer, out of it."""
    offset_of = bucket.offset_of_unshard
    for unshard, first_use in bucket.first_use_of_unshard.items():
        parameter, shape, world_size = (ops.argument(unshard, name) for name in ("parameter", "shape", "world_size"))
        value = unshard.meta["val"]
        arguments: tuple[Any, ...] = parameter, offset + offset_of[unshard], shape, world_size
        with graph.inserting_before(first_use):
            form = form if forms.is_integers(form := bucket.form_of(unshard)) else None
            dtype = value.dtype if form is not None or value.dtype != buffer.meta["val"].dtype else None
            if is_view and dtype is None:
                full = ops.call(graph, ops.VIEW_OUT, buffer, *arguments, like=unshard, value=value)
            else:
                full = ops.call(graph, ops.COPY_OUT, buffer, *arguments, dtype, form, like=unshard, value=value)
        unshard.replace_all_uses_with(full)


@dataclasses.dataclass(frozen=True)
class GatheredBucket:
    """A bucket that the graph reads: which parameters, each from where on.

    Attributes:
        world_size: the ranks that the parameters are sharded over.
        num_gathered: the ranks of `group`; fewer where each has kept more than its shard.
    """

    shard: torch.fx.Node
    first_use_of_unshard: dict[torch.fx.Node, torch.fx.Node]
    name: str
    world_size: int
    num_gathered: int
    group: str

    @property
    def parts(self) -> list[torch.fx.Node]:
        """What is kept of the gathered buffer for the backward."""
        return [user for user in self.shard.users if ops.is_call(user, ops.PART)]

    @property
    def is_parted(self) -> bool:
        return bool(self.parts) or metadata.kept_part(self.shard) is not None

    @property
    def first_use(self) -> torch.fx.Node:
        return next(iter(self.first_use_of_unshard.values()))

    @property
    def dtype(self) -> torch.dtype:
        """What is sent: bytes, or the narrowest that is wanted. Few backends send a float8 as what it is."""
        if any(forms.is_integers(self.form_of(unshard)) for unshard in self.first_use_of_unshard):
            return forms.MESSAGE
        wanted: list[torch.dtype] = [unshard.meta["val"].dtype for unshard in self.first_use_of_unshard]
        narrowest = min(wanted, key=lambda dtype: dtype.itemsize)
        return forms.MESSAGE if forms.is_float8(narrowest) else narrowest

    def form_of(self, unshard: torch.fx.Node) -> str:
        """The form in which a parameter is sent, by itself."""
        asked, dtype = ops.argument(unshard, "gather_form"), unshard.meta["val"].dtype
        return forms.form_for(ops.argument(unshard, "shape"), asked if self.world_size > 1 else "", dtype)

    def by_dtype(self) -> Iterator[GatheredBucket]:
        """The bucket as one for each dtype that is wanted."""
        uses: dict[torch.dtype, dict[torch.fx.Node, torch.fx.Node]] = {}
        for unshard, first_use in self.first_use_of_unshard.items():
            uses.setdefault(unshard.meta["val"].dtype, {})[unshard] = first_use
        for same in uses.values():
            yield dataclasses.replace(self, first_use_of_unshard=same)

    @cached_property
    def regions(self) -> dict[torch.fx.Node, forms.Region]:
        """What is sent of the shard where it is not sent whole: what stands in its parameters, in their order."""
        if {unshard.meta["val"].dtype for unshard in self.first_use_of_unshard} == {self.dtype}:
            return {}
        found, numel = {}, self.shard.meta["val"].numel()
        for unshard in sorted(self.first_use_of_unshard, key=lambda unshard: ops.argument(unshard, "offset")):
            asked, shape = ops.argument(unshard, "gather_form"), ops.argument(unshard, "shape")
            place, dtype = ops.argument(unshard, "offset"), unshard.meta["val"].dtype
            taken = shard_numel(shape, self.world_size)
            found[unshard] = forms.region_at(place, shape, taken, asked, dtype, numel)
        return found

    @property
    def offset_of_unshard(self) -> dict[torch.fx.Node, int]:
        """Where each parameter begins in what a rank sends."""
        if not (regions := self.regions):
            return {unshard: ops.argument(unshard, "offset") for unshard in self.first_use_of_unshard}
        ends = [0, *accumulate(map(self._sent_numel, regions.values()))]
        return dict(zip(regions, ends, strict=False))

    @property
    def sent_numel(self) -> int:
        """Elements that a rank sends."""
        if not (regions := self.regions):
            return int(self.shard.meta["val"].numel())
        return sum(map(self._sent_numel, regions.values()))

    def _sent_numel(self, region: forms.Region) -> int:
        return region.num_bytes // self.dtype.itemsize

    @property
    def kind(self) -> tuple[str, int, torch.dtype, torch.device]:
        """What is alike in buckets that can be gathered at once."""
        wanted = next(iter(self.first_use_of_unshard)).meta["val"]
        return self.group, self.num_gathered, self.dtype, wanted.device

    @property
    def holds_one_parameter(self) -> bool:
        unshard = next(iter(self.first_use_of_unshard))
        needed = shard_numel(ops.argument(unshard, "shape"), self.world_size)
        return not self.regions and bool(needed * self.world_size == self.shard.meta["val"].numel() * self.num_gathered)


def gathered_buckets(graph: torch.fx.Graph) -> list[GatheredBucket]:
    """The buckets in the order of their first use."""
    position = analysis.positions(graph)
    unshards = [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) and node.users]
    first_use = {node: analysis.first_use(node, position) for node in unshards}
    unshards_of_shard: dict[torch.fx.Node, dict[torch.fx.Node, torch.fx.Node]] = {}
    for node in sorted(unshards, key=lambda unshard: position[first_use[unshard]]):
        unshards_of_shard.setdefault(ops.argument(node, "shard"), {})[node] = first_use[node]
    return [_bucket(shard, uses) for shard, uses in unshards_of_shard.items()]


def _bucket(shard: torch.fx.Node, uses: dict[torch.fx.Node, torch.fx.Node]) -> GatheredBucket:
    first = next(iter(uses))
    name, world_size, group = (ops.argument(first, name) for name in ("bucket", "world_size", "group"))
    part = metadata.kept_part(shard)
    gathered = (world_size, group) if part is None else (part.size, part.group)
    return GatheredBucket(shard, uses, name, world_size, *gathered)


def _converted(graph: torch.fx.Graph, bucket: GatheredBucket) -> torch.fx.Node:
    """The shard on the device and in the dtype of the computation, or what is sent of it."""
    source, wanted = bucket.shard, next(iter(bucket.first_use_of_unshard)).meta["val"]
    if ops.is_call(source, ops.SCALE):  # as late as the gather itself
        source = ops.call(graph, ops.SCALE, *source.args)
    if source.meta["val"].device != wanted.device:
        source = ops.call(graph, ops.MOVE, source, wanted.device)
    if regions := bucket.regions:
        arguments = forms.arguments_of(regions.values())
        return ops.call(graph, ops.NARROW, source, bucket.name, *arguments, bucket.dtype)
    if source.meta["val"].dtype != bucket.dtype:
        source = ops.call(graph, ops.CAST, source, bucket.dtype)
    return source


def _sink_parameter_values(graph: torch.fx.Graph) -> None:
    """Move every value that follows from parameters alone to just before the first node that needs it."""
    full = {node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) or metadata.kept_parameter(node)}
    movable = analysis.parameter_only(graph, full) - full
    position = analysis.positions(graph)
    key: dict[torch.fx.Node, Any] = {node: (index, 1, 0) for node, index in position.items()}
    for node in reversed(list(graph.nodes)):
        if node in movable and node.users:
            deadline = min(key[user][0] for user in node.users)
            key[node] = (deadline, 0, position[node])
    analysis.reorder(graph, key)
