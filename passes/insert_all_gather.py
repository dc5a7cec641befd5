"""Insert all-gathers: each bucket is gathered once, and each of its parameters taken out just before its first use.

    Before   w = unshard(shard); v = unshard(shard); ...; mm(x, t(w)); ...; mm(y, t(v))
    After    g = wait(all_gather(shard)); ...; w = copy_out(g); mm(x, t(w)); ...; v = copy_out(g); mm(y, t(v))
    Needs    one unshard per parameter (merge_unshards)
    Keeps    data flow; the order of the nodes, but views and casts of parameters move down to where they are read
    Cost     O(nodes), one all-gather per bucket

The packed form copies each parameter out of the gathered buffer, except where the bucket holds a single one: its
chunks already lie one after another. In the grouped form every parameter is gathered into its place and only viewed.
A bucket that is not sharded (`world_size` 1) needs no gather. A shard is moved to the device and cast to the dtype of
the computation before it is gathered. A part of the gathered buffer that is kept for the backward is copied at once.

The wait stands before the kernel that a compiler will form around the first use: where that is a light operator, after
the last heavy one (a matmul, say) before it. A wait amid a run of light operators would cut their kernel into two.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.fx

from . import analysis, ops


@dataclasses.dataclass(frozen=True)
class InsertAllGather:
    """`grouped` selects the form of every bucket's gather; see the module's text."""

    grouped: bool = False

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        _sink_parameter_values(gm.graph)
        for bucket in gathered_buckets(gm.graph):
            self._gather(gm.graph, bucket)
        gm.graph.eliminate_dead_code()

    def _gather(self, graph: torch.fx.Graph, bucket: GatheredBucket) -> None:
        is_grouped = self.grouped and not bucket.is_parted
        with graph.inserting_before(analysis.kernel_begin(bucket.first_use)):
            buffer = _converted(graph, bucket)
            if bucket.world_size > 1:
                gather = ops.ALL_GATHER_GROUPED if is_grouped else ops.ALL_GATHER
                pending = ops.call(graph, gather, buffer, bucket.name, bucket.num_gathered, bucket.group)
                buffer = ops.call(graph, ops.WAIT, pending)
            for part in bucket.parts:
                arguments = [ops.argument(part, name) for name in ("bucket", "parts", "index")]
                part.replace_all_uses_with(ops.call(graph, ops.RESHARD, buffer, *arguments, like=part))
        is_view = is_grouped or bucket.world_size == 1 or bucket.holds_one_parameter
        for unshard, first_use in bucket.first_use_of_unshard.items():
            out = ops.VIEW_OUT if is_view else ops.COPY_OUT
            placement = [ops.argument(unshard, name) for name in ("parameter", "offset", "shape", "world_size")]
            with graph.inserting_before(first_use):
                full = ops.call(graph, out, buffer, *placement, like=unshard)
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
        return bool(self.parts) or ops.kept_part(self.shard) is not None

    @property
    def first_use(self) -> torch.fx.Node:
        return next(iter(self.first_use_of_unshard.values()))

    @property
    def holds_one_parameter(self) -> bool:
        unshard = next(iter(self.first_use_of_unshard))
        needed = ops.shard_numel(ops.argument(unshard, "shape"), self.world_size)
        return bool(needed * self.world_size == self.shard.meta["val"].numel() * self.num_gathered)


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
    part = ops.kept_part(shard)
    gathered = (world_size, group) if part is None else (part.size, part.group)
    return GatheredBucket(shard, uses, name, world_size, *gathered)


def _converted(graph: torch.fx.Graph, bucket: GatheredBucket) -> torch.fx.Node:
    """The shard on the device and in the dtype of the computation."""
    source, wanted = bucket.shard, next(iter(bucket.first_use_of_unshard)).meta["val"]
    if source.meta["val"].device != wanted.device:
        source = ops.call(graph, ops.MOVE, source, wanted.device)
    if source.meta["val"].dtype != wanted.dtype:
        source = ops.call(graph, ops.CAST, source, wanted.dtype)
    return source


def _sink_parameter_values(graph: torch.fx.Graph) -> None:
    """Move every value that follows from parameters alone to just before the first node that needs it."""
    full = {node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) or ops.kept_parameter(node)}
    movable = analysis.parameter_only(graph, full) - full
    position = analysis.positions(graph)
    key: dict[torch.fx.Node, Any] = {node: (index, 1, 0) for node, index in position.items()}
    for node in reversed(list(graph.nodes)):
        if node in movable and node.users:
            deadline = min(key[user][0] for user in node.users)
            key[node] = (deadline, 0, position[node])
    analysis.reorder(graph, key)
