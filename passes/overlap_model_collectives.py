"""Overlap the model's own collectives, such as those of tensor and expert parallelism, with what does not need them.

    Before   d = mm(g, w); e = mm(g.T, x); c = reduce_scatter_tensor(d); s = wait_tensor(c); f(s); h = mm(y, z)
    After    d = mm(g, w); c = reduce_scatter_tensor(d); e = mm(g.T, x); h = mm(y, z); s = wait_tensor(c); f(s)
    Needs    nothing; it runs before communication is inserted, which follows the order that it leaves
    Keeps    data flow, the order of the collectives, of random numbers and of what is written in place
    Cost     O(nodes) for each collective; what is computed meanwhile keeps its inputs, and its results, a little longer

DTensor and others wait for each collective where they start it. Between the collective before it and the one after it,
what it is computed from goes first, and what does not read its result goes between its start and its wait: in the
backward of a split linear layer, the gradient of the weight. Where that would be no matmul, nothing moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.fx

from . import analysis, ops


@dataclasses.dataclass(frozen=True)
class OverlapModelCollectives:
    def __call__(self, gm: torch.fx.GraphModule) -> None:
        order = list(gm.graph.nodes)
        for here in [index for index, node in enumerate(order) if ops.is_functional_collective(node)]:
            begin, end = _around(here, order)  # between other collectives: they keep their places
            order[begin:end] = _overlapped(order[here], order[begin:end])
        analysis.reorder(gm.graph, {node: index for index, node in enumerate(order)})


def _around(here: int, order: Sequence[torch.fx.Node]) -> tuple[int, int]:
    """The part of the order in which nodes may move: from this collective to the next nodes that keep their place."""
    begin = here
    while not analysis.keeps_place(order[begin - 1]) and not ops.is_functional_wait(order[begin - 1]):
        begin -= 1  # what runs beside the collective before this one stays there
    end = here + 1
    while not analysis.keeps_place(order[end]):
        end += 1
    return begin, end


def _overlapped(collective: torch.fx.Node, nodes: Sequence[torch.fx.Node]) -> Sequence[torch.fx.Node]:
    """`nodes` in an order in which the collective runs beside a matmul; as they are if there is no such order."""
    inputs, results = _leading_to(collective, nodes), _following_from(collective, nodes)
    first = [node for node in nodes if node in inputs]
    last = [node for node in nodes if node in results]
    meanwhile = [node for node in nodes if node not in inputs and node not in results and node is not collective]
    return [*first, collective, *meanwhile, *last] if any(map(analysis.is_heavy, meanwhile)) else nodes


def _leading_to(collective: torch.fx.Node, nodes: Sequence[torch.fx.Node]) -> set[torch.fx.Node]:
    """What the collective is computed from, and checks of sizes, which come before their use."""
    before = nodes[: nodes.index(collective)]
    found = {node for node in before if not node.users}
    found.update(collective.all_input_nodes)
    for node in reversed(before):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def _following_from(collective: torch.fx.Node, nodes: Iterable[torch.fx.Node]) -> set[torch.fx.Node]:
    """The wait for the collective, and everything that reads its result."""
    found = {collective}
    for node in nodes:
        if found.intersection(node.all_input_nodes):
            found.add(node)
    return found - {collective}
