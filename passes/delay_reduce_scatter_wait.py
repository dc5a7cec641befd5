"""Delay the waits for reductions: nothing needs a reduced gradient before the end of the graph.

    Before   wait(reduce_scatter(p2)); mm1; p1 = pack(...); wait(reduce_scatter(p1)); return
    After    reduce_scatter(p2); mm1; wait p2; p1 = pack(...); reduce_scatter(p1); wait p1; return
    Needs    every reduction waited for once (insert_reduce_scatter)
    Keeps    data flow, the order of the collectives, outputs
    Cost     O(nodes); up to `distance` packed gradients alive while they are reduced

A wait moves to just before the `distance`-th reduction after its own is packed, so that its buffer is gone when the
next one is filled. A reduction over a second mesh axis starts when the first is waited for, and is waited for as late
again. Casts of what was reduced stay behind its wait.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch.fx

from . import analysis, ops
from .errors import required_wait


@dataclasses.dataclass(frozen=True)
class DelayReduceScatterWait:
    """`distance`: how many reductions may be under way at once; 0 waits for each at once."""

    distance: int = 1

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        position = analysis.positions(gm.graph)
        key: dict[torch.fx.Node, Any] = {node: (index, 1) for node, index in position.items()}
        for link, deadline, turn in deadlines(gm.graph, self.distance):
            for node in link:
                key[node] = (position[deadline], 0, turn, position[node])
        analysis.reorder(gm.graph, key)


def deadlines(graph: torch.fx.Graph, distance: int) -> list[tuple[list[torch.fx.Node], torch.fx.Node, int]]:
    """What is to run late (the wait for a reduction and what follows up to the next wait), and before which node.

    The third tells in which turn, among those that are to run before the same node: as reductions start, so they are
    waited for.
    """
    for node in filter(ops.is_reduction, graph.nodes):
        required_wait(node)
    if distance == 0:
        return []
    reductions = [node for node in graph.nodes if ops.is_reduction(node) and not _continues(node)]
    begins = [_begin(node) for node in reductions]
    ends = [*begins, *[graph.output_node()] * 2 * distance]
    return [
        (link, ends[index + late], index + late)
        for index, node in enumerate(reductions)
        for late, link in zip(itertools.count(distance, distance), _links(_followers(node)), strict=False)
    ]


def _continues(node: torch.fx.Node) -> bool:
    """Whether this reduction takes the result of another one, over the other mesh axis."""
    source = _source(node)
    return source is not None and ops.is_call(source, ops.WAIT)


def _begin(node: torch.fx.Node) -> torch.fx.Node:
    source = _source(node)
    return source if source is not None and ops.is_call(source, ops.PACK) else node


def _source(node: torch.fx.Node) -> torch.fx.Node | None:
    """What was converted to what a reduction sends; None for several gradients."""
    source = node.args[0]
    while isinstance(source, torch.fx.Node) and ops.is_conversion(source):
        source = source.args[0]
    return source if isinstance(source, torch.fx.Node) else None


def _links(followers: list[torch.fx.Node]) -> list[list[torch.fx.Node]]:
    """`followers` in pieces that begin with a wait."""
    links: list[list[torch.fx.Node]] = []
    for node in followers:
        if ops.is_call(node, ops.WAIT):
            links.append([])
        links[-1].append(node)
    return links


def _followers(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The chain of waits, reductions and conversions that begins with the wait for `node`."""

    def follows(user: torch.fx.Node) -> bool:
        return ops.is_call(user, ops.WAIT) or ops.is_reduction(user) or ops.is_conversion(user)

    chain = []
    while following := list(filter(follows, node.users)):
        node = following[0]
        chain.append(node)
    return chain
