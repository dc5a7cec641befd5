"""Merge gradients: the sum of a shard's `reduce_gradient` contributions becomes a single `reduce_gradient`.

Before   add(reduce_gradient([g1], w), add(reduce_gradient([g2], w), reduce_gradient([g3], b)))
After    reduce_gradient([add(g1, g2), g3], w, b)
Needs    nothing: autograd adds up what the reads of one shard contribute
Keeps    every contribution; those to one parameter are added in the order in which autograd adds them
Cost     O(nodes)

Gradients that are kept for a later step (`pack`) merge likewise. What earlier steps kept, or their messages lost, is
added once.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.fx

from . import ops

_ADD = torch.ops.aten.add.Tensor


@dataclasses.dataclass(frozen=True)
class MergeGradients:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        for total, parts in gradient_sums(gm.graph).items():
            _merge(gm.graph, total, parts)
        gm.graph.eliminate_dead_code()


def gradient_sums(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Every sum of `reduce_gradient` (or of `pack`) calls, outermost sums only, with those calls in order."""
    parts_of_sum: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if ops.is_call(node, ops.REDUCE_GRADIENT, ops.PACK):
            parts_of_sum[node] = [node]
        elif ops.is_call(node, _ADD) and all(source in parts_of_sum for source in node.args):
            parts_of_sum[node] = [part for source in node.all_input_nodes for part in parts_of_sum.pop(source)]
    return {total: parts for total, parts in parts_of_sum.items() if len(parts) > 1}


def _merge(graph: torch.fx.Graph, total: torch.fx.Node, parts: list[torch.fx.Node]) -> None:
    gradient_of_slot: dict[tuple[int, str], torch.fx.Node] = {}
    with graph.inserting_before(total):
        for part in parts:
            gradients, parameters, offsets = (
                ops.argument(part, name) for name in ("gradients", "parameters", "offsets")
            )
            for gradient, *slot in zip(gradients, offsets, parameters, strict=True):
                earlier = gradient_of_slot.get((slot[0], slot[1]))
                added = gradient if earlier is None else ops.call(graph, _ADD, earlier, gradient, like=total)
                gradient_of_slot[slot[0], slot[1]] = added
        slots = sorted(gradient_of_slot)
        merged = ops.call(
            graph,
            parts[0].target,
            [gradient_of_slot[slot] for slot in slots],
            *(ops.argument(parts[0], name) for name in ("accumulated", "residual", "bucket")),
            [parameter for _, parameter in slots],
            [offset for offset, _ in slots],
            *parts[0].args[6:],
            like=total,
        )
    total.replace_all_uses_with(merged)
