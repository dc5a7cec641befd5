"""Update in the backward: the optimizer updates a shard as soon as its gradient is there, and the gradient dies.

    Before   d = wait(reduce_scatter(p)); ...; return d
    After    d = wait(reduce_scatter(p)); update(d); ...; return None
    Needs    gathers and reductions in their final places
    Keeps    data flow, the order of the collectives
    Cost     O(nodes); one call of the optimizer for each bucket

An update stands behind its gradient, and behind the last node that reads the memory of the shard: of a bucket that is
not sharded, that is whatever reads a parameter. Gradients that are kept for a later step are returned as before; so are
those that are copied to the CPU, since they are there only when the host has waited for all copies.
"""

from __future__ import annotations

import dataclasses

import torch.fx

from . import analysis, metadata, ops
from .errors import refuse_calls


@dataclasses.dataclass(frozen=True)
class UpdateInBackward:
    """`states`: how many tensors of a shard's size the optimizer keeps for it; 2 for Adam."""

    states: int = 2

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_calls(gm.graph, ops.UNSHARD, ops.PART, until="InsertAllGather")
        refuse_calls(gm.graph, ops.REDUCE_GRADIENT, until="InsertReduceScatter")
        refuse_calls(gm.graph, ops.MOVE, until="OverlapCopies")
        graph, position = gm.graph, analysis.positions(gm.graph)
        returned = analysis.outputs(graph)
        found = {value: reduction for value in returned if (reduction := reduction_of(value)) is not None}
        for gradient in sorted(
            found, key=position.__getitem__, reverse=True
        ):  # those with the same place stay in order
            bucket, output = ops.argument(found[gradient], "bucket"), returned.index(gradient)
            last = max([gradient, *readers_of_shard(graph, found[gradient])], key=position.__getitem__)
            while ops.is_call(last.next, ops.FREE, ops.STORE):
                last = last.next
            with graph.inserting_before(last.next):
                ops.call(graph, ops.UPDATE, gradient, bucket, output, self.states, like=gradient)
            returned[output] = None
        graph.output_node().args = (tuple(returned),)


def reduction_of(gradient: torch.fx.Node | None) -> torch.fx.Node | None:
    """What packs or reduces the gradients of a bucket, if `gradient` is the result of that, and on its device."""
    node, is_reduced = gradient, False
    while node is not None and (ops.is_call(node, ops.WAIT, ops.CAST, ops.DIVIDE) or ops.is_reduction(node)):
        is_reduced |= ops.is_reduction(node)
        if ops.is_call(node, ops.REDUCE_SCATTER_GROUPED):
            return node
        node = node.args[0]  # type: ignore[assignment]
    return node if is_reduced and node is not None and ops.is_call(node, ops.PACK) else None


def readers_of_shard(graph: torch.fx.Graph, reduction: torch.fx.Node) -> list[torch.fx.Node]:
    """What reads the memory of the shard whose gradients `reduction` packs: waits for its gathers, or its parameters'
    readers, where it is not gathered."""
    bucket, names = ops.argument(reduction, "bucket"), ops.argument(reduction, "parameters")
    gathers = [node for node in graph.nodes if ops.is_all_gather(node) and bucket in ops.buckets_of(node)]
    found = [ops.wait_of(gather) for gather in gathers]
    if ops.argument(reduction, "world_size") == 1:
        full = [node for node in graph.nodes if _parameter(node) in names]
        found += [use for parameter in full for use in analysis.uses(parameter) if use.op != "output"]
    return found


def _parameter(node: torch.fx.Node) -> str | None:
    """The full parameter that a node is."""
    if kept := metadata.kept_parameter(node):
        return kept.parameter
    return str(ops.argument(node, "parameter")) if ops.is_parameter_out(node) else None
