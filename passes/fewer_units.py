"""Fewer units: a joint graph without some of the equal units in its middle, as of a model with fewer layers.

To plan for all layers of a model takes as long as for a few of them, times their number. What wins for a few wins for
all, where they are equal.

What belongs to a unit follows from the data flow: of the forward, what the unit's parameters lead to and those of no
later unit do; of the backward, what leads to the unit's gradients and to those of no later unit. Units are equal that
compute the same operators of the same shapes in the same order. Where some are left out, the forward of the unit behind
them reads what the unit before them computes, and the backward of the unit before them what the unit behind them does:

    x1 = f(x0, w0); x2 = f(x1, w1); x3 = f(x2, w2); x4 = f(x3, w3)    becomes    x1 = f(x0, w0); x4 = f(x1, w3)

All inputs stay. The gradients of what is left out become None. The graph has its unshards and gradients merged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from itertools import groupby

import torch
import torch.fx

from . import analysis, ops

_SINKS = (ops.REDUCE_GRADIENT, ops.PACK)


@dataclasses.dataclass(frozen=True)
class EqualUnits:
    """Units one after another that compute the same.

    Attributes:
        names: in the order of their use.
        forward, backward: for each, its nodes in the order of the graph.
        num_units: of the graph, all others counted, too.
    """

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
        return cls(longest, [forward[unit] for unit in longest], [backward[unit] for unit in longest], len(units))

    def skip(self, begin: int, end: int) -> bool:
        """Take the units from `begin` to `end` (excluded) out of the graph; False if it cannot be, and nothing is done.

        Both have a neighbour: 0 < `begin` < `end` < the number of units.
        """
        removed = {node for nodes in (*self.forward[begin:end], *self.backward[begin:end]) for node in nodes}
        graph = self.forward[0][0].graph
        output = graph.output_node()
        if not all(ops.is_call(value, *_SINKS) for value in analysis.outputs(graph) if value in removed):
            return False
        # The forward of the units behind reads the unit before, and the backward of the units before the unit behind.
        previous = dict(zip(self.forward[end - 1], self.forward[begin - 1], strict=True))
        following = dict(zip(self.forward[begin], self.forward[end], strict=True))
        following |= dict(zip(self.backward[begin], self.backward[end], strict=True))
        in_backward = {node for nodes in self.backward[:begin] for node in nodes}
        replaced = [
            (reader, source, (following if reader in in_backward else previous).get(source))
            for reader in graph.nodes
            if reader not in removed and reader is not output
            for source in reader.all_input_nodes
            if source in removed
        ]
        if any(new is None for _, _, new in replaced):
            return False
        for reader, source, new in replaced:
            reader.replace_input_with(source, new)
        output.args = (tuple(None if value in removed else value for value in analysis.outputs(graph)),)
        for node in reversed(list(graph.nodes)):
            if node in removed:
                graph.erase_node(node)
        analysis.erase_dead(graph)
        _put_in_order(graph)
        return True


def _put_in_order(graph: torch.fx.Graph) -> None:
    """Move what is read before it is computed: the backward has values of the forward computed where it needs them."""
    place: dict[torch.fx.Node, int] = {}

    def put(node: torch.fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in place:
                put(source)
        place.setdefault(node, len(place))

    for node in graph.nodes:
        put(node)
    analysis.reorder(graph, place)


def _units(graph: torch.fx.Graph) -> dict[str, Hashable]:
    """The units in the order of their first use, each with the shapes and dtypes of its parameters."""
    position = analysis.positions(graph)
    unshards = [node for node in graph.nodes if ops.is_call(node, ops.UNSHARD) and node.users]
    parameters: dict[str, list[Hashable]] = {}
    for node in sorted(unshards, key=lambda unshard: position[analysis.first_use(unshard, position)]):
        parameters.setdefault(_unit(node), []).append(_shape(node))
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
        own = number[_unit(node)] if ops.is_call(node, ops.UNSHARD) and node.users else -1
        last_before[node] = max(own, *(last_before[source] for source in sources), -1)
        if ops.is_tangent(node) or not follows_tangents.isdisjoint(sources):
            follows_tangents.add(node)
    last_behind: dict[torch.fx.Node, int] = {}
    for node in reversed(graph.nodes):
        own = number.get(_unit(node), -1) if ops.is_call(node, *_SINKS) else -1
        last_behind[node] = max(own, *(last_behind[user] for user in node.users if user.op != "output"), -1)
    forward: dict[str, list[torch.fx.Node]] = {unit: [] for unit in units}
    backward: dict[str, list[torch.fx.Node]] = {unit: [] for unit in units}
    for node in graph.nodes:
        side, last = (backward, last_behind) if node in follows_tangents else (forward, last_before)
        if node.op == "call_function" and last[node] >= 0:
            side[units[last[node]]].append(node)
    return forward, backward


def _unit(node: torch.fx.Node) -> str:
    return ops.unit_of_bucket(ops.argument(node, "bucket"))


def _key(nodes: Sequence[torch.fx.Node]) -> Hashable:
    """The same for nodes that compute the same."""
    return tuple(map(_description, nodes))


def _description(node: torch.fx.Node) -> Hashable:
    if ops.is_dialect(node):  # its other arguments are names and places
        return node.target, _shape(node)
    return node.target, repr(torch.fx.map_arg((node.args, node.kwargs), lambda _: "node")), _shape(node)


def _shape(node: torch.fx.Node) -> Hashable:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple((tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else type(each) for each in values)
