"""Compute early: no value waits behind communication to be computed, if it could be part of a kernel before it.

    Before   g = mul(sum(x), s); wait(...); y = mm(g, w)      n = add(m, x); wait(...); y = mm(x, w); copy_(m, n)
    After    g = store(mul(sum(x), s)); wait(...); y = mm(g, w)     n = add(m, x); copy_(m, n); wait(...); y = mm(x, w)
    Needs    gathers and reductions in their final places
    Keeps    values; order, except for writes to inputs of the graph
    Cost     O(nodes)

Inductor computes pointwise operators where their values are needed in memory: by a matmul, by a reduction of gradients,
at the end of the graph. It fuses nothing across communication, so behind some they are a kernel of their own; before
it, they are a part of the kernel that computes what they read. Writes to inputs, as BatchNorm's to its statistics, are
at the end of the graph where AOTAutograd leaves them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from . import analysis, ops
from .errors import refuse_unplaced


@dataclasses.dataclass(frozen=True)
class ComputeEarly:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        refuse_unplaced(gm.graph)
        for value, readers in needed_late(gm.graph).items():
            with gm.graph.inserting_before(value.next):
                stored = ops.call(gm.graph, ops.STORE, value, like=value, value=value.meta["val"])
            for reader in readers:
                reader.replace_input_with(value, stored)
        position = analysis.positions(gm.graph)
        key: dict[torch.fx.Node, Any] = {node: (index, 0, 0) for node, index in position.items()}
        for write in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
            if write.args[0].op == "placeholder" and not write.users:
                key[write] = (max(position[node] for node in _needs(write)), 1, position[write])
        analysis.reorder(gm.graph, key)


def needed_late(graph: torch.fx.Graph) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """What pointwise operators compute from a reduction's result, and what needs that in memory behind communication.

    By the value, its readers on the way to there.
    """
    num_before: dict[torch.fx.Node, int] = {}
    follows: set[torch.fx.Node] = set()
    found, count = {}, 0
    for node in graph.nodes:
        num_before[node] = count
        count += ops.is_collective(node) or ops.is_copy(node) or ops.is_call(node, ops.WAIT)
        sources = [source for source in node.all_input_nodes if num_before[source] == num_before[node]]
        if any(source in follows or _is_reduction(source) for source in sources):
            follows |= {node} if _is_pointwise(node) or analysis.is_alias(node) else set()
    for node in filter(_is_pointwise, graph.nodes):
        readers = [user for user in node.users if _is_late(user, num_before[node], num_before)]
        if node in follows and readers:
            found[node] = readers
    return found


def _is_pointwise(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _is_reduction(node: torch.fx.Node) -> bool:
    """Whether this is a kernel of its own that pointwise operators can be fused with."""
    is_ours = not isinstance(node.target, torch._ops.OpOverload) or ops.is_dialect(node)
    return not (is_ours or _is_pointwise(node) or analysis.is_alias(node) or analysis.is_heavy(node))


def _is_late(reader: torch.fx.Node, num: int, num_before: Mapping[torch.fx.Node, int]) -> bool:
    """Whether this needs a value in memory, or a view of it does, with more communication before it than `num`."""
    if ops.is_call(reader, ops.STORE):
        return False
    if analysis.is_alias(reader):
        return any(_is_late(user, num, num_before) for user in reader.users)
    is_sent = ops.is_dialect(reader) and not ops.is_call(reader, ops.FREE)
    return (is_sent or reader.op == "output" or analysis.is_heavy(reader)) and num_before[reader] > num


def _needs(write: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes that a write to an input has to follow: they compute what is written, or read what was there."""
    buffer, value = write.all_input_nodes
    return analysis.uses(buffer) - {write, write.graph.output_node()} | {value}
