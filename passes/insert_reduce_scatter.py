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

With a `reduce_form` ranks send each other their gradients in that form (`forms`), and each sums up in float32 what it
receives: `d = sum_up(wait(all_to_all(pack([g1, g2]))))`. So nothing is rounded between two ranks, as it is by a
reduce-scatter in a narrow dtype. With a `residual`, what earlier messages lost is packed with the gradients, and what
this one loses is kept in its place: `keep(remainder([g1, g2], residual), residual)`. With an `all_reduce_form` replicas
send each other what their ranks have summed up, and all compute the same sum, in the same order:
`d = sum_up(wait(all_gather_sums(narrow(d))))`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.fx

from . import analysis, forms, ops
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
        names = ("bucket", "reduction", "world_size", "group", "replicas")
        bucket, reduction, world_size, group, replicas = (ops.argument(node, name) for name in names)
        gradients = _gradients_of(node)
        dtype = ops.argument(node, "reduce_dtype") or ops.argument(node, "gradients")[0].meta["val"].dtype
        regions, of_replicas = _sent_regions(node, dtype)
        if world_size == 1:
            result = ops.call(graph, ops.PACK, *gradients, 1, dtype, *forms.NO_REGIONS, like=node)
        elif regions:
            result = _summed_up(graph, node, regions, dtype)
        else:
            axis = world_size, group
            if self.grouped and ops.argument(node, "accumulated") is None:
                pending = ops.call(graph, ops.REDUCE_SCATTER_GROUPED, *gradients, *axis, dtype, reduction, like=node)
            else:
                packed = ops.call(graph, ops.PACK, *gradients, world_size, dtype, *forms.NO_REGIONS, like=node)
                pending = ops.call(graph, ops.REDUCE_SCATTER, packed, bucket, *axis, reduction, like=node)
            result = ops.call(graph, ops.WAIT, pending, like=node, value=pending.meta["val"])
        return _over_replicas(graph, node, result, of_replicas) if replicas > 1 else result


def _summed_up(
    graph: torch.fx.Graph, node: torch.fx.Node, regions: list[forms.Region], dtype: torch.dtype
) -> torch.fx.Node:
    """The sum of what all ranks have sent this one in a form, or the mean."""
    bucket, world_size, group = (ops.argument(node, name) for name in ("bucket", "world_size", "group"))
    form, arguments = ops.argument(node, "reduce_form"), forms.arguments_of(regions)
    packed = (forms.MESSAGE, *arguments) if forms.is_integers(form) else (forms.dtype_of_name(form), *forms.NO_REGIONS)
    is_fed_back = forms.is_integers(form) and ops.argument(node, "residual") is not None
    gradients = _gradients_of(node, is_fed_back=is_fed_back)
    sent = ops.call(graph, ops.PACK, *gradients, world_size, *packed, like=node)
    if is_fed_back:
        remainder = ops.call(graph, ops.REMAINDER, *gradients, world_size, *arguments, like=node)
    pending = ops.call(graph, ops.ALL_TO_ALL, sent, bucket, world_size, group, like=node)
    if is_fed_back:
        ops.call(graph, ops.KEEP, remainder, ops.argument(node, "residual"), bucket, like=node)
    return _sum_of(graph, node, pending, regions, world_size, dtype)


def _over_replicas(
    graph: torch.fx.Graph, node: torch.fx.Node, sums: torch.fx.Node, regions: list[forms.Region]
) -> torch.fx.Node:
    """The sum of what the ranks of each replica have summed up, or the mean."""
    names = ("bucket", "reduction", "replicas", "replica_group", "all_reduce_form")
    bucket, reduction, replicas, replica_group, form = (ops.argument(node, name) for name in names)
    axis = replicas, replica_group
    if not regions:
        pending = ops.call(graph, ops.ALL_REDUCE, sums, bucket, *axis, reduction, like=node)
        return ops.call(graph, ops.WAIT, pending, like=node, value=pending.meta["val"])
    if forms.is_integers(form):
        sent = ops.call(graph, ops.NARROW, sums, bucket, *forms.arguments_of(regions), forms.MESSAGE, like=node)
    else:
        sent = ops.call(graph, ops.CAST, sums, forms.dtype_of_name(form), like=node)
    pending = ops.call(graph, ops.ALL_GATHER_SUMS, sent, bucket, *axis, like=node)
    return _sum_of(graph, node, pending, regions, replicas, sums.meta["val"].dtype)


def _sum_of(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    pending: torch.fx.Node,
    regions: list[forms.Region],
    num_senders: int,
    dtype: torch.dtype,
) -> torch.fx.Node:
    """The sum of what so many have sent of values in this dtype, or the mean, once it is there."""
    bucket, reduction, numel = (ops.argument(node, name) for name in ("bucket", "reduction", "numel"))
    arguments, wide = forms.arguments_of(regions), torch.promote_types(dtype, torch.float32)
    received = ops.call(graph, ops.WAIT, pending, like=node, value=pending.meta["val"])
    return ops.call(graph, ops.SUM_UP, received, bucket, *arguments, numel, num_senders, wide, reduction, like=node)


def _gradients_of(node: torch.fx.Node, *, is_fed_back: bool = False) -> list[Any]:
    """The first arguments of a reduce_gradient: what is packed, with what messages have lost if that is fed back."""
    gradients, accumulated, residual, *rest = node.args[:7]
    return [gradients, accumulated, residual if is_fed_back else None, *rest]


def _sent_regions(node: torch.fx.Node, dtype: torch.dtype) -> tuple[list[forms.Region], list[forms.Region]]:
    """What each rank's part of gradients, and of their sums, consists of, where `node` (reduce_gradient) has forms."""
    names = ("gradients", "offsets", "world_size", "numel", "accumulated", "reduce_form", "all_reduce_form")
    gradients, offsets, world_size, numel, accumulated, *asked = (ops.argument(node, name) for name in names)
    shapes = [tuple(gradient.meta["val"].shape) for gradient in gradients]
    forms_of_axes, is_whole = (asked[0], asked[1]), accumulated is not None
    return forms.reduced_regions(offsets, shapes, world_size, forms_of_axes, dtype, numel, is_whole=is_whole)


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
    inputs = analysis.inputs(graph)  # a piece between two graph breaks may have none

    def ready(node: torch.fx.Node) -> torch.fx.Node:
        """Inputs stay together at the top of the graph."""
        return inputs[-1] if last[node].op == "placeholder" else analysis.kernel_end(last[node])

    return {node: ready(node) for node in sorted(nodes, key=lambda node: position[last[node]])}
