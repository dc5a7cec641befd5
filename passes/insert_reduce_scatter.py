"""Insert reduce-scatters: the gradients of a bucket are packed and reduced as soon as the last of them is known.

    Before   g1 = mm(...); g2 = sum(...); ...; d = reduce_gradient([g1, g2], w, b); return d
    After    g1 = mm(...); g2 = sum(...); d = wait(reduce_scatter(pack([g1, g2]))); ...; return d
    Needs    one reduce_gradient per bucket (merge_gradients)
    Keeps    data flow
    Cost     O(nodes); one reduction per bucket and mesh axis

A reduction does not cut a kernel in two: it begins behind what a compiler will compute together with the last gradient
(a norm's backward computes the gradients of its scale and of its input from the same values).

In the grouped form each gradient is reduced by itself, in one call, and nothing is packed. A bucket that is not sharded
(`world_size` 1) is reduced by an all-reduce over its replicas; with both axes, the reduce-scatter comes first.

Gradients are cast to the dtype of the reduction as they are packed, and cast back, divided and moved to the device of
the shard after. Gradients to be kept for a later step are packed as early, and not reduced; that step packs them again,
added to its own, whatever the form.
"""

from __future__ import annotations

import dataclasses

import torch.fx

from . import analysis, ops
from .errors import pass_error
from .merge_gradients import gradient_sums
from .printer import printed_name


@dataclasses.dataclass(frozen=True)
class InsertReduceScatter:
    """`grouped` selects the form of every bucket's reduction; see the module's text."""

    grouped: bool = False

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        for total in gradient_sums(gm.graph):
            raise pass_error(f"{printed_name(total)} adds up gradients of one shard: run MergeGradients first", total)
        for node, ready in reversed(reductions(gm.graph).items()):  # those with the same place stay in order
            with gm.graph.inserting_before(ready.next):
                if ops.is_call(node, ops.PACK):
                    result = ops.call(gm.graph, ops.PACK, *node.args, like=node)
                else:
                    result = _restore(gm.graph, node, self._reduce(gm.graph, node))
            node.replace_all_uses_with(result)
            gm.graph.erase_node(node)

    def _reduce(self, graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
        names = ("bucket", "reduction", "world_size", "group", "replicas", "replica_group")
        bucket, reduction, world_size, group, replicas, replica_group = (ops.argument(node, name) for name in names)
        gradients = node.args[:6]
        dtype = ops.argument(node, "reduce_dtype") or ops.argument(node, "gradients")[0].meta["val"].dtype
        if world_size == 1:
            result = ops.call(graph, ops.PACK, *gradients, 1, dtype, like=node)
        else:
            axis = world_size, group
            if self.grouped and ops.argument(node, "accumulated") is None:
                pending = ops.call(graph, ops.REDUCE_SCATTER_GROUPED, *gradients, *axis, dtype, reduction, like=node)
            else:
                packed = ops.call(graph, ops.PACK, *gradients, world_size, dtype, like=node)
                pending = ops.call(graph, ops.REDUCE_SCATTER, packed, bucket, *axis, reduction, like=node)
            result = ops.call(graph, ops.WAIT, pending, like=node, value=pending.meta["val"])
        if replicas > 1:
            axis = replicas, replica_group
            pending = ops.call(graph, ops.ALL_REDUCE, result, bucket, *axis, reduction, like=node)
            result = ops.call(graph, ops.WAIT, pending, like=node, value=pending.meta["val"])
        return result


def _restore(graph: torch.fx.Graph, node: torch.fx.Node, reduced: torch.fx.Node) -> torch.fx.Node:
    """The result of a reduction in the scale and dtype and on the device that `node` (reduce_gradient) asks for."""
    dtype, divisor, device = (ops.argument(node, name) for name in ("dtype", "divisor", "device"))
    if reduced.meta["val"].dtype != dtype:
        reduced = ops.call(graph, ops.CAST, reduced, dtype, like=node)
    if divisor != 1:
        reduced = ops.call(graph, ops.DIVIDE, reduced, divisor, like=node)
    if reduced.meta["val"].device != device:
        reduced = ops.call(graph, ops.MOVE, reduced, device, like=node)
    return reduced


def reductions(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Every reduce_gradient or pack, with the last node of the kernel that computes the last of its gradients.

    They are in the order in which the last gradients are computed.
    """
    position = analysis.positions(graph)
    nodes = [node for node in graph.nodes if ops.is_call(node, ops.REDUCE_GRADIENT, ops.PACK)]
    last = {node: max(node.all_input_nodes, key=position.__getitem__) for node in nodes}
    last_input = max(analysis.inputs(graph), key=position.__getitem__)

    def ready(node: torch.fx.Node) -> torch.fx.Node:
        """Inputs stay together at the top of the graph."""
        return last_input if last[node].op == "placeholder" else analysis.kernel_end(last[node])

    return {node: ready(node) for node in sorted(nodes, key=lambda node: position[last[node]])}
