"""Insert reduce-scatters: the gradients of a bucket are packed and reduced as soon as the last of them is known.

    Before   g1 = mm(...); g2 = sum(...); ...; d = reduce_gradient([g1, g2], w, b); return d
    After    g1 = mm(...); g2 = sum(...); d = wait(reduce_scatter(pack([g1, g2]))); ...; return d
    Needs    one reduce_gradient per bucket (merge_gradients)
    Keeps    data flow
    Cost     O(nodes); one reduction per bucket and mesh axis

In the grouped form each gradient is reduced by itself, in one call, and nothing is packed. A bucket that is not sharded
(`world_size` 1) is reduced by an all-reduce over its replicas; with both axes, the reduce-scatter comes first.
"""

from __future__ import annotations

import dataclasses

import torch.fx

from . import analysis, ops


@dataclasses.dataclass(frozen=True)
class InsertReduceScatter:
    """`grouped` selects the form of every bucket's reduction; see the module's text."""

    grouped: bool = False

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        for node, ready in reductions(gm.graph).items():
            with gm.graph.inserting_before(ready.next):
                node.replace_all_uses_with(self._reduce(gm.graph, node))
            gm.graph.erase_node(node)

    def _reduce(self, graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
        names = ("bucket", "reduction", "world_size", "group", "replicas", "replica_group")
        bucket, reduction, world_size, group, replicas, replica_group = (ops.argument(node, name) for name in names)
        gradients = node.args[:5]
        if world_size == 1:
            result = ops.call(graph, ops.PACK, *gradients, 1, like=node)
        else:
            axis = world_size, group
            if self.grouped:
                pending = ops.call(graph, ops.REDUCE_SCATTER_GROUPED, *gradients, *axis, reduction, like=node)
            else:
                packed = ops.call(graph, ops.PACK, *gradients, world_size, like=node)
                pending = ops.call(graph, ops.REDUCE_SCATTER, packed, bucket, *axis, reduction, like=node)
            result = ops.call(graph, ops.WAIT, pending, like=node)
        if replicas > 1:
            axis = replicas, replica_group
            pending = ops.call(graph, ops.ALL_REDUCE, result, bucket, *axis, reduction, like=node)
            result = ops.call(graph, ops.WAIT, pending, like=node)
        return result


def reductions(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Every reduce_gradient with the node that computes the last of its gradients, in the order of the latter."""
    position = analysis.positions(graph)
    nodes = [node for node in graph.nodes if ops.is_call(node, ops.REDUCE_GRADIENT)]
    ready = {node: max(node.all_input_nodes, key=position.__getitem__) for node in nodes}
    last_input = max(analysis.inputs(graph), key=position.__getitem__)
    for node, last in ready.items():
        if last.op == "placeholder":  # inputs stay together at the top of the graph
            ready[node] = last_input
    return {node: ready[node] for node in sorted(nodes, key=lambda node: position[ready[node]])}
