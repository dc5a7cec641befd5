"""More units: a joint graph with more of its equal units, as of a model with more layers.

To trace a model takes as long as to trace one of its layers, times their number. Where layers are equal
(`equal_units.py`), copies of one that was traced stand for those that were not:

    x1 = f(x0, w0); x2 = f(x1, w1)    becomes    x1 = f(x0, w0); y = f(x1, v); x2 = f(y, w1)

What a unit reads of another one is as many units away from it as before. A copy has inputs of its own where its
original has, and the graph returns their gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.fx

from . import analysis, ops
from .equal_units import SINKS, EqualUnits, description_of, unit_of

_REGION = "ac_graph_id"  # torch's note of which region that is computed again in the backward a node is in

Place = tuple[int, int]
"""The number of a unit, in order, and a position among its nodes."""


def repeat_unit(
    equal: EqualUnits, number: int, names: Sequence[str], num_fwd_outputs: int
) -> dict[torch.fx.Node, list[torch.fx.Node]] | None:
    """Insert copies of a unit behind it.

    Args:
        number: of that unit; two are before it, and one is behind it.
        names: of the copies.
        num_fwd_outputs: so many outputs are the forward's; behind them there is one for each input but the tangents.

    Returns:
        The copies of each input; None if there cannot be any, and nothing is done.
    """
    assert 2 <= number < len(equal.names) - 1, number
    graph, units, num_copies = equal.graph, _Units.of(equal), len(names)
    output, inputs = graph.output_node(), _differentiable(graph)
    values = analysis.outputs(graph)
    returned = list(zip(values, output.meta.get("desc", [None] * len(values)), strict=True))
    if len(inputs) != len(returned) - num_fwd_outputs or not units.may_repeat(number, values, inputs):
        return None
    key = _Order.of(units, number, num_copies).key
    keys = {node: key(node) for node in graph.nodes}
    copies = []
    for index in range(1, num_copies + 1):
        copies.append([_copy_of(node, index) for node in units.nodes[number]])
        keys |= {copied: key(node, index) for node, copied in zip(units.nodes[number], copies[-1], strict=True)}
    afterwards = [*units.nodes[: number + 1], *copies, *units.nodes[number + 1 :]]
    _connect(units, afterwards, [min(new, max(number, new - num_copies)) for new in range(len(afterwards))])
    gradient_of = dict(zip(inputs, returned[num_fwd_outputs:], strict=True))
    for name, nodes in zip(names, copies, strict=True):
        rename_units(nodes, {equal.names[number]: name})
        copy_of = dict(zip(units.nodes[number], nodes, strict=True))
        for node in copy_of.keys() & gradient_of.keys():
            gradient, description = gradient_of[node]
            gradient_of[copy_of[node]] = copy_of.get(gradient), description
    _number_regions(units, number, copies)
    analysis.put_in_order(graph, sorted(graph.nodes, key=keys.__getitem__))
    returned = [*returned[:num_fwd_outputs], *(gradient_of[node] for node in _differentiable(graph))]
    output.args = ([value for value, _ in returned],)
    if "desc" in output.meta:
        output.meta["desc"] = [description for _, description in returned]
    return {node: [copied[at] for copied in copies] for at, node in enumerate(units.nodes[number]) if node in inputs}


def _number_regions(units: _Units, number: int, copies: Sequence[Sequence[torch.fx.Node]]) -> None:
    """Number the regions that are computed again: every copy has its own, and numbers rise from unit to unit."""
    regions = [node.meta.get(_REGION) for node in units.nodes[number]]
    if (last := max((region for region in regions if region is not None), default=None)) is None:
        return
    following = [node.meta.get(_REGION) for node in units.nodes[number + 1]]
    period = next(after - region for region, after in zip(regions, following, strict=True) if region is not None)
    for node in units.graph.nodes:
        if node.meta.get(_REGION, last) > last:
            node.meta[_REGION] += period * len(copies)
    for index, nodes in enumerate(copies, 1):
        for node in nodes:
            if _REGION in node.meta:
                node.meta[_REGION] += period * index


def rename_units(nodes: Iterable[torch.fx.Node], names: Mapping[str, str]) -> None:
    """Give units other names, and with them the parameters of these modules, in the arguments of nodes."""
    for node in nodes:
        if ops.is_call(node, ops.UNSHARD, *SINKS) and (name := names.get(before := unit_of(node))) is not None:
            kind = ops.kind_of_bucket(ops.argument(node, "bucket"))
            ops.set_argument(node, "bucket", ops.bucket_of_unit(name, kind))
            if ops.is_call(node, ops.UNSHARD):
                ops.set_argument(node, "parameter", _renamed(ops.argument(node, "parameter"), before, name))
            else:
                parameters = [_renamed(parameter, before, name) for parameter in ops.argument(node, "parameters")]
                ops.set_argument(node, "parameters", parameters)


def _renamed(parameter: str, before: str, name: str) -> str:
    inner = parameter.removeprefix(f"{before}.")
    return parameter if inner == parameter else f"{name}.{inner}"


@dataclasses.dataclass(frozen=True)
class _Units:
    """The nodes of equal units.

    Attributes:
        nodes: of each unit, in an order that is the same for all: inputs and constants that nobody else reads, forward,
            backward.
    """

    graph: torch.fx.Graph
    nodes: Sequence[Sequence[torch.fx.Node]]
    place: Mapping[torch.fx.Node, Place]

    @classmethod
    def of(cls, equal: EqualUnits) -> _Units:
        calls = [[*forward, *backward] for forward, backward in zip(equal.forward, equal.backward, strict=True)]
        number = {node: index for index, nodes in enumerate(calls) for node in nodes}
        own: list[list[torch.fx.Node]] = [[] for _ in calls]
        for node in equal.graph.nodes:
            readers = {number.get(user, -1) for user in node.users if user.op != "output"}
            if node not in number and not node.all_input_nodes and len(readers) == 1 and (reader := readers.pop()) >= 0:
                own[reader].append(node)
        nodes = [[*first, *called] for first, called in zip(own, calls, strict=True)]
        place = {node: (unit, at) for unit, of_unit in enumerate(nodes) for at, node in enumerate(of_unit)}
        return cls(equal.graph, nodes, place)

    def may_repeat(self, number: int, returned: Sequence[Any], inputs: Sequence[torch.fx.Node]) -> bool:
        """Whether a copy of the unit is to the next unit what the unit before is to it.

        Args:
            returned: by the graph. The last ones are gradients of `inputs`.
        """
        results, gradients = returned[: -len(inputs)], returned[-len(inputs) :]
        others = [node for node in self.graph.nodes if node not in self.place and node.op != "output"]
        read = {self._unit(source) for node in others for source in node.all_input_nodes}
        pairs = [(self._unit(gradient), self._unit(node)) for gradient, node in zip(gradients, inputs, strict=True)]
        return (
            len(set(map(len, self.nodes))) == 1
            and self._sources(number) == self._sources(number - 1)
            and list(map(description_of, self.nodes[number])) == list(map(description_of, self.nodes[number - 1]))
            and read <= {None, 0, len(self.nodes) - 1}
            and all(self._unit(value) is None for value in results)
            and all(unit in (None, unit_of_input) for unit, unit_of_input in pairs)
        )

    def _unit(self, value: Any) -> int | None:
        return self.place[value][0] if isinstance(value, torch.fx.Node) and value in self.place else None

    def _sources(self, number: int) -> list[list[Any]]:
        """What every node of a unit reads: something of no unit, or how many units away, and where there."""
        places = [[(source, self.place.get(source)) for source in node.all_input_nodes] for node in self.nodes[number]]
        return [[source if at is None else (at[0] - number, at[1]) for source, at in read] for read in places]


@dataclasses.dataclass(frozen=True)
class _Order:
    """Where nodes are, once there are copies: these follow each other as the unit and the next one do.

    Attributes:
        position: before there are copies.
        last_input: the position of the last input of the unit alone.
        begin: of the unit, of the next one, in forward and backward; there the next one comes first.
        backward: the position where the backward begins.
    """

    units: _Units
    number: int
    num_copies: int
    position: Mapping[torch.fx.Node, int]
    last_input: int
    begin: tuple[int, int]
    next_begin: tuple[int, int]
    backward: int

    @classmethod
    def of(cls, units: _Units, number: int, num_copies: int) -> _Order:
        position = analysis.positions(units.graph)
        tangents = filter(ops.is_tangent, analysis.inputs(units.graph))
        backward = min(position[user] for tangent in tangents for user in tangent.users)

        def begin(unit: int) -> tuple[int, int]:
            places = [position[node] for node in units.nodes[unit] if node.op != "placeholder"]
            return min(places), min(place for place in places if place >= backward)

        inputs = [position[node] for node in units.nodes[number] if node.op == "placeholder"]
        last_input = max(inputs, default=-1)
        return cls(units, number, num_copies, position, last_input, begin(number), begin(number + 1), backward)

    def key(self, node: torch.fx.Node, copy: int = 0) -> tuple[int, int]:
        """Of a node, or of a copy of it, counted from 1."""
        position, (unit, _) = self.position[node], self.units.place.get(node, (None, 0))
        if node.op == "placeholder":
            return self.last_input if copy else position, copy
        period = self.next_begin[0] - self.begin[0]
        if position < self.backward:
            is_behind = position >= self.next_begin[0] if unit is None else unit > self.number
            return position + period * (self.num_copies if is_behind else copy), 0
        in_backward = self.begin[1] - self.next_begin[1]
        is_behind = position >= self.begin[1] if unit is None else unit <= self.number
        return position + period * self.num_copies + in_backward * (self.num_copies - copy if is_behind else 0), 0


def _copy_of(node: torch.fx.Node, index: int) -> torch.fx.Node:
    """A node like it, before the graph returns, that reads the same."""
    target = f"{node.target}_copy_{index}" if node.op == "placeholder" else node.target
    with node.graph.inserting_before(node.graph.output_node()):
        copied = node.graph.create_node(node.op, target, node.args, node.kwargs)
    copied.meta = dict(node.meta)
    return copied


def _connect(units: _Units, afterwards: Sequence[Sequence[torch.fx.Node]], before: Sequence[int]) -> None:
    """Have every unit read what is as far from it as before; `before` has the numbers that units had, or originals."""
    changes = []
    for new, (old, nodes) in enumerate(zip(before, afterwards, strict=True)):

        def source_of(source: torch.fx.Node, by: int = new - old) -> torch.fx.Node:
            unit, at = units.place.get(source, (None, 0))
            return source if unit is None else afterwards[unit + by][at]

        for node in nodes:
            changes.append((node, torch.fx.map_arg((node.args, node.kwargs), source_of)))
    for node, (args, kwargs) in changes:
        node.args, node.kwargs = args, kwargs


def _differentiable(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The inputs of the forward, whose gradients the graph returns, in order."""
    return [node for node in analysis.inputs(graph) if not ops.is_tangent(node)]
