"""Merge all-reduces: gradients of a bucket that the model itself sums up among ranks are summed up in one message.

Before   s1 = wait(all_reduce(g1)); s2 = wait(all_reduce(g2)); d = reduce_gradient([s1, s2, g3], w, b, v)
After    s = wait(all_reduce(cat(g1, g2))); d = reduce_gradient([s[:n], s[n:], g3], w, b, v)
Needs    nothing: each reduce_gradient is looked at by itself
Keeps    every sum, up to the order in which a process group adds
Cost     O(nodes); one copy of these gradients

Sequence parallelism replicates the parameters of norms, and every rank sees a part of the sequence: DTensor sums up
their gradients one by one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.fx

from . import analysis, ops

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class MergeAllReduces:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        position = analysis.positions(gm.graph)
        for node in [node for node in gm.graph.nodes if ops.is_call(node, ops.REDUCE_GRADIENT, ops.PACK)]:
            waits_of_kind: dict[Hashable, list[torch.fx.Node]] = {}
            for wait in dict.fromkeys(filter(_is_summed, ops.argument(node, "gradients"))):
                waits_of_kind.setdefault(_kind(wait.all_input_nodes[0]), []).append(wait)
            for waits in waits_of_kind.values():
                if len(waits) > 1:
                    _merge(gm.graph, sorted(waits, key=position.__getitem__))


def _is_summed(gradient: torch.fx.Node) -> bool:
    """Whether this waits for an all-reduce of the model, and nothing else reads either."""
    if not ops.is_functional_wait(gradient) or len(gradient.users) > 1:
        return False
    (pending,) = gradient.all_input_nodes
    return ops.is_call(pending, torch.ops._c10d_functional.all_reduce.default) and len(pending.users) == 1


def _kind(pending: torch.fx.Node) -> Hashable:
    """What is equal where gradients can be summed up together."""
    value: Any = pending.meta["val"]
    return (*pending.args[1:], value.dtype, value.device)


def _merge(graph: torch.fx.Graph, waits: Sequence[torch.fx.Node]) -> None:
    pending = [wait.all_input_nodes[0] for wait in waits]
    last = waits[-1]
    with graph.inserting_before(last):
        gradients = [each.all_input_nodes[0] for each in pending]
        flat = [ops.call(graph, _aten.reshape.default, each, [-1], like=last) for each in gradients]
        joined = ops.call(graph, _aten.cat.default, flat, like=last)
        summed = ops.call(graph, pending[-1].target, joined, *pending[-1].args[1:], like=last, value=joined.meta["val"])
        received = ops.call(graph, last.target, summed, like=last, value=joined.meta["val"])
        begin = 0
        for wait, gradient in zip(waits, gradients, strict=True):
            shape = list(gradient.meta["val"].shape)
            end = begin + math.prod(shape)
            part = ops.call(graph, _aten.slice.Tensor, received, 0, begin, end, like=wait)
            wait.replace_all_uses_with(ops.call(graph, _aten.view.default, part, shape, like=wait))
            begin = end
    for node in (*waits, *pending):
        graph.erase_node(node)
