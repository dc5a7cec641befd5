"""Merge unshards: one `unshard` per parameter, however often the program reads it.

Before   a = unshard(shard, w); b = unshard(shard, w)
After    a = unshard(shard, w), in place of b too
Needs    nothing
Keeps    data flow
Cost     O(nodes)
"""

from __future__ import annotations

import dataclasses

import torch.fx

from . import ops
from .errors import pass_error
from .printer import printed_name


@dataclasses.dataclass(frozen=True)
class MergeUnshards:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        for node, first in repeated_unshards(gm.graph).items():
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)


def repeated_unshards(graph: torch.fx.Graph) -> dict[torch.fx.Node, torch.fx.Node]:
    """Every `unshard` that reads a parameter again, with the first one that read it."""
    first_of_parameter: dict[tuple[torch.fx.Node, int], torch.fx.Node] = {}
    repeated = {}
    for node in graph.nodes:
        if ops.is_call(node, ops.UNSHARD):
            parameter = (ops.argument(node, "shard"), ops.argument(node, "offset"))
            first = first_of_parameter.setdefault(parameter, node)
            if first is not node:
                repeated[node] = first
    return repeated


def refuse_repeated_unshards(graph: torch.fx.Graph) -> None:
    """For the passes that need each parameter to be read once: raise a `PassError` if one is read again."""
    for node, first in repeated_unshards(graph).items():
        names = printed_name(node), printed_name(first)
        raise pass_error("{} reads the same parameter as {}: run MergeUnshards first".format(*names), node)
