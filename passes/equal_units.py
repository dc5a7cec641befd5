"""Equal units: those of a joint graph that compute the same, as the layers of a transformer do.

What belongs to a unit follows from the data flow: of the forward, what the unit's parameters lead to and those of no
later unit do; of the backward, what leads to the unit's gradients and to those of no later unit. Units are equal that
compute the same operators of the same shapes in the same order.

The graph has its unshards and gradients merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from itertools import groupby

import torch
import torch.fx

from . import analysis, ops

SINKS = (ops.REDUCE_GRADIENT, ops.PACK)


@dataclasses.dataclass(frozen=True)
class EqualUnits:
    """Units one after another that compute the same.

    Attributes:
        graph: in which they are.
        names: in the order of their use.
        forward, backward: for each, its nodes in the order of the graph.
        num_units: of the graph, all others counted, too.
    """

    graph: torch.fx.Graph
    names: Sequence[str]
    forward: Sequence[Sequence[torch.fx.Node]]
    backward: Sequence[Sequence[torch.fx.Node]]
    num_units: int

    @classmethod
    def of(cls, graph: torch.fx.Graph) -> EqualUnits | None:
        """The longest sequence of them; None where no unit equals the one before it."""
        units = _units(graph)
        forward, backward = _nodes_of_units(graph, list(units))
        key = {unit: (shapes, _key(forward[unit]), _key(backward[unit])) for unit, shapes in units.items()}
        longest = max((list(run) for _, run in groupby(units, key.__getitem__)), key=len, default=[])
        if len(longest) < 2:
            return None
        of_forward, of_backward = ([side[unit] for unit in longest] for side in (forward, backward))
        return cls(graph, longest, of_forward, of_backward, len(units))


def _units(graph: torch.fx.Graph) -> dict[str, Hashable]:
    """The units in the order of their first use, each with the shapes and dtypes of its parameters."""
    position = analysis.positions(graph)
    unshards = [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) and node.users]
    parameters: dict[str, list[Hashable]] = {}
    for node in sorted(unshards, key=lambda unshard: position[analysis.first_use(unshard, position)]):
        parameters.setdefault(unit_of(node), []).append(_shape(node))
    return {unit: tuple(shapes) for unit, shapes in parameters.items()}


def _nodes_of_units(
    graph: torch.fx.Graph, units: Sequence[str]
) -> tuple[dict[str, list[torch.fx.Node]], dict[str, list[torch.fx.Node]]]:
    """What belongs to each unit, in forward and backward; see the module's text."""
    number = {unit: index for index, unit in enumerate(units)}
    last_before: dict[torch.fx.Node, int] = {}
    follows_tangents: set[torch.fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        own = number[unit_of(node)] if ops.is_call(node, ops.UNSHARD) and node.users else -1
        last_before[node] = max(own, *(last_before[source] for source in sources), -1)
        if ops.is_tangent(node) or not follows_tangents.isdisjoint(sources):
            follows_tangents.add(node)
    last_behind: dict[torch.fx.Node, int] = {}
    for node in reversed(graph.nodes):
        own = number.get(unit_of(node), -1) if ops.is_call(node, *SINKS) else -1
        last_behind[node] = max(own, *(last_behind[user] for user in node.users if user.op != "output"), -1)
    forward: dict[str, list[torch.fx.Node]] = {unit: [] for unit in units}
    backward: dict[str, list[torch.fx.Node]] = {unit: [] for unit in units}
    for node in graph.nodes:
        side, last = (backward, last_behind) if node in follows_tangents else (forward, last_before)
        if node.op == "call_function" and last[node] >= 0:
            side[units[last[node]]].append(node)
    return forward, backward


def unit_of(node: torch.fx.Node) -> str:
    return ops.unit_of_bucket(ops.argument(node, "bucket"))


def _key(nodes: Sequence[torch.fx.Node]) -> Hashable:
    """The same for nodes that compute the same."""
    return tuple(map(description_of, nodes))


def description_of(node: torch.fx.Node) -> Hashable:
    """The same for nodes that compute the same of what they read; of an input, its shape and dtype."""
    if node.op == "placeholder":
        return _shape(node)
    if ops.is_dialect(node):  # its other arguments are names and places
        return node.target, _shape(node)
    return node.target, repr(torch.fx.map_arg((node.args, node.kwargs), lambda _: "node")), _shape(node)


def _shape(node: torch.fx.Node) -> Hashable:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple((tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else type(each) for each in values)
