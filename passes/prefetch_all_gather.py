"""Prefetch all-gathers: start each one before the compute that can hide it.

    Before   wait(all_gather(w1)); mm1; wait(all_gather(w2)); mm2
    After    all_gather(w1); all_gather(w2); wait w1; mm1; wait w2; mm2
    Needs    every gather waited for once (insert_all_gather)
    Keeps    data flow, the order of the gathers, outputs
    Cost     O(nodes); up to `distance` more gathered units alive

Distance counts units, in the order of their first use: with distance 1 the gathers of a unit start just before the unit
before it is waited for, so that one unit is on its way while one is computed with. A unit that the backward takes over
from the forward counts, though it is not gathered. What would start before the first such unit starts at the top.
A cast of a shard starts with its gather; a copy from another device starts one unit earlier.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.fx

from . import analysis, ops
from .errors import pass_error


@dataclasses.dataclass(frozen=True)
class PrefetchAllGather:
    """`distance`: how many units ahead of its use a unit is gathered; 0 starts it when it is needed."""

    distance: int = 1

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        position = analysis.positions(gm.graph)
        key: dict[torch.fx.Node, Any] = {node: (index, 1, 0) for node, index in position.items()}
        start_of_move = starts(gm.graph, self.distance + 1) if self.distance else {}
        for gather, start in starts(gm.graph, self.distance).items():
            for node in [gather, *_conversions(gather)]:
                begin = start_of_move[gather] if self.distance and ops.is_call(node, ops.MOVE) else start
                key[node] = (position[begin], 0, position[node])
        analysis.reorder(gm.graph, key)


def starts(graph: torch.fx.Graph, distance: int) -> dict[torch.fx.Node, torch.fx.Node]:
    """For every all-gather the node that it is to start before."""
    units = _uses_of_units(graph)
    top = next(node for node in graph.nodes if node.op != "placeholder")
    start_of_gather: dict[torch.fx.Node, torch.fx.Node] = {}
    for index, (_, nodes) in enumerate(units):
        is_first = index < distance or _is_first_kept(units, index - distance)
        for wait in nodes:
            if ops.is_call(wait, ops.WAIT):
                gather: Any = wait.args[0]
                start_of_gather[gather] = top if is_first else units[index - distance][1][0]
    return start_of_gather


def _uses_of_units(graph: torch.fx.Graph) -> list[tuple[str, list[torch.fx.Node]]]:
    """The units in the order of their use: for each, the waits for its gathers or the first use of what was kept."""
    position = analysis.positions(graph)
    bucket_of_use = {_wait(node): ops.argument(node, "bucket") for node in graph.nodes if ops.is_all_gather(node)}
    for node in analysis.inputs(graph):
        if kept := ops.kept_parameter(node):
            bucket_of_use[analysis.first_use(node, position)] = kept.bucket
    units: list[tuple[str, list[torch.fx.Node]]] = []
    for use in sorted(bucket_of_use, key=position.__getitem__):
        unit = ops.unit_of_bucket(bucket_of_use[use])
        if units and units[-1][0] == unit:
            units[-1][1].append(use)
        else:
            units.append((unit, [use]))
    return units


def _conversions(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """The casts and moves of the shard that is gathered."""
    source: Any = gather.args[0]
    found = []
    while ops.is_conversion(source):
        found.append(source)
        source = source.args[0]
    return found


def _is_first_kept(units: list[tuple[str, list[torch.fx.Node]]], index: int) -> bool:
    """Whether this is the first unit, and the backward has it from the forward."""
    return index == 0 and not ops.is_call(units[0][1][0], ops.WAIT)


def _wait(gather: torch.fx.Node) -> torch.fx.Node:
    waits = [user for user in gather.users if ops.is_call(user, ops.WAIT)]
    if len(waits) != 1:
        raise pass_error(f"{gather} needs one wait", gather)
    return waits[0]
