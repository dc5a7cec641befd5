"""Prefetch all-gathers: start each one before the compute that can hide it.

    Before   wait(all_gather(w1)); mm1; wait(all_gather(w2)); mm2
    After    all_gather(w1); all_gather(w2); wait w1; mm1; wait w2; mm2
    Needs    every gather waited for once (insert_all_gather)
    Keeps    data flow, the order of the gathers, outputs
    Cost     O(nodes); up to `distance` more gathered units alive

Distance counts units, in the order of their first use: with distance 1 the gathers of a unit start just before the unit
before it is waited for, so that one unit is on its way while one is computed with. A unit that the backward takes over
from the forward counts, though it is not gathered. What would start before the first such unit starts at the top.
A cast of a shard starts with its gather; a copy from another device starts one unit earlier. No gather starts before
scales of float8 are known, if any is scaled by some (`commute_scales`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx

from . import analysis, metadata, ops
from .errors import pass_error, required_wait
from .plan import Gather, PrefetchList


@dataclasses.dataclass(frozen=True)
class PrefetchAllGather:
    """`distance`: how many units ahead of its use a unit is gathered; 0 starts it when it is needed.

    `plan` says instead, for the gathers that it names, before the first use of which parameter they start; `lists`, for
    the units ahead that they name, before the use of which units.
    """

    distance: int = 1
    plan: tuple[Gather, ...] = ()
    lists: tuple[PrefetchList, ...] = ()

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        position = analysis.positions(gm.graph)
        key: dict[torch.fx.Node, Any] = {node: (index, 1, 0) for node, index in position.items()}
        start_of_move = starts(gm.graph, self.distance + 1) if self.distance else {}
        planned = planned_starts(gm.graph, self.plan)
        start_of_gather = starts(gm.graph, self.distance) | planned
        if self.lists:
            start_of_gather = in_order(start_of_gather | listed_starts(gm.graph, self.lists), position)
        top = max((position[scale] + 1 for scale in map(_last_scale, start_of_gather) if scale is not None), default=0)
        for gather, start in start_of_gather.items():
            for node in [gather, *_prepares(gather)]:
                is_early = self.distance and gather not in planned and ops.is_call(node, ops.MOVE)
                begin = start_of_move[gather] if is_early else start
                key[node] = (max(top, position[begin]), 0, position[node])
        analysis.reorder(gm.graph, key)


def planned_starts(graph: torch.fx.Graph, plan: Sequence[Gather]) -> dict[torch.fx.Node, torch.fx.Node]:
    """For every all-gather of the plan the node that it is to start before.

    A plan is kept for inputs of other shapes, where what is computed again may stand in another order. Wherever the
    plan would have it, a gather starts before its wait, and not after a gather that is waited for later.
    """
    top = _top(graph)
    use_of_parameter = first_uses(graph)
    start_of_bucket = {ops.name_of_buckets(gather.buckets): gather.start for gather in plan}
    found = {}
    for node in filter(ops.is_all_gather, graph.nodes):
        if (bucket := ops.argument(node, "bucket")) in start_of_bucket:
            start = start_of_bucket[bucket]
            if start is not None and start not in use_of_parameter:
                raise pass_error(f"{bucket} is planned to start before {start}, which the graph does not use", node)
            found[node] = top if start is None else use_of_parameter[start]
    return in_order(found, analysis.positions(graph))


def listed_starts(graph: torch.fx.Graph, lists: Sequence[PrefetchList]) -> dict[torch.fx.Node, torch.fx.Node]:
    """For every all-gather of a unit that is listed the node that it is to start before, if the graph has that.

    Which of several uses of a unit comes first decides, and of several lists with it the earliest.
    """
    position = analysis.positions(graph)
    uses = _uses_of_units(graph)
    found: dict[torch.fx.Node, torch.fx.Node] = {}
    for each in lists:
        anchors = [nodes[0] for unit, nodes in uses if unit in each.units]
        waits = [use for unit, nodes in uses if unit in each.ahead for use in nodes if ops.is_call(use, ops.WAIT)]
        for wait in waits if anchors else ():
            gather: Any = wait.args[0]
            found[gather] = min(found.get(gather, anchors[0]), anchors[0], key=position.__getitem__)
    return found


def in_order(
    start_of_gather: dict[torch.fx.Node, torch.fx.Node], position: Mapping[torch.fx.Node, int]
) -> dict[torch.fx.Node, torch.fx.Node]:
    """The starts, but none after its own wait, or after the start of a gather that is waited for later."""
    found = dict(start_of_gather)
    earliest: list[torch.fx.Node] = []
    for node in sorted(found, key=lambda gather: position[required_wait(gather)], reverse=True):
        earliest = [min(*earliest, found[node], required_wait(node), key=position.__getitem__)]
        found[node] = earliest[0]
    return found


def first_uses(graph: torch.fx.Graph) -> dict[str, torch.fx.Node]:
    """For every parameter where the kernel begins that uses it first, or what is waited for there."""
    position = analysis.positions(graph)
    found: dict[str, torch.fx.Node] = {}
    for node in graph.nodes:
        if ops.is_parameter_out(node):
            found.setdefault(ops.argument(node, "parameter"), _before_waits(analysis.kernel_begin(node)))
        elif kept := metadata.kept_parameter(node):
            use = analysis.first_use(node, position)
            found.setdefault(kept.parameter, _before_waits(analysis.kernel_begin(use)))
    return found


def _before_waits(node: torch.fx.Node) -> torch.fx.Node:
    """The first of the waits for gathers that stand right before `node`, or `node`; after frees."""
    while ops.is_call(node, ops.FREE):
        node = node.next  # what ends here is gone before anything starts
    first = node
    while _gathers(node.prev):
        node = node.prev
        first = node if ops.is_call(node, ops.WAIT) else first
    return first


def _gathers(node: torch.fx.Node) -> bool:
    """Whether this is an all-gather, the wait for one, or what prepares a shard."""
    if ops.is_call(node, ops.WAIT):
        return ops.is_all_gather(node.all_input_nodes[0])
    return ops.is_all_gather(node) or _is_preparation(node)


def _top(graph: torch.fx.Graph) -> torch.fx.Node:
    top: torch.fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return top


def starts(graph: torch.fx.Graph, distance: int) -> dict[torch.fx.Node, torch.fx.Node]:
    """For every all-gather the node that it is to start before."""
    units = _uses_of_units(graph)
    top = _top(graph)
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
    bucket_of_use = {
        required_wait(node): ops.argument(node, "bucket") for node in graph.nodes if ops.is_all_gather(node)
    }
    for node in analysis.inputs(graph):
        if kept := metadata.kept_parameter(node):
            bucket_of_use[analysis.first_use(node, position)] = kept.bucket
    units: list[tuple[str, list[torch.fx.Node]]] = []
    for use in sorted(bucket_of_use, key=position.__getitem__):
        unit = ops.unit_of_bucket(bucket_of_use[use])
        if units and units[-1][0] == unit:
            units[-1][1].append(use)
        else:
            units.append((unit, [use]))
    return units


def _prepares(gather: torch.fx.Node) -> list[torch.fx.Node]:
    """What is done to the shards before they are gathered: moves, casts, and joining them."""
    found: list[torch.fx.Node] = []
    sources = list(gather.all_input_nodes)
    for source in sources:
        if _is_preparation(source):
            found.append(source)
            sources += source.all_input_nodes
    return found


def _last_scale(gather: torch.fx.Node) -> torch.fx.Node | None:
    """The last of the scales by which a shard is multiplied that is gathered; they are computed at the top."""
    scales = [scale for node in _prepares(gather) if ops.is_call(node, ops.SCALE) for scale in node.all_input_nodes[1:]]
    return max(scales, default=None)


def _is_preparation(node: torch.fx.Node) -> bool:
    return ops.is_conversion(node) or ops.is_call(node, ops.JOIN)


def _is_first_kept(units: list[tuple[str, list[torch.fx.Node]]], index: int) -> bool:
    """Whether this is the first unit, and the backward has it from the forward."""
    return index == 0 and not ops.is_call(units[0][1][0], ops.WAIT)
