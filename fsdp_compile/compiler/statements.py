"""Statements: what a rank is about to do, line by line, for all ranks to compare (`runtime.agreement`).

They hold what the ranks have to have in common, and nothing that may differ: neither the shapes of inputs nor what is
computed with them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch.fx

from ..graphs import RewrittenGraph, RewrittenGraphs
from ..passes import ops
from ..runtime.comparison import Line
from ..runtime.places import Place
from .partitioner import bucket_gradients

_FRAME = re.compile(r'File "(.*)", line (\d+), in .*\n\s*(.*)')
_SHOWN = 6  # units that a place names
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


@dataclasses.dataclass(frozen=True)
class Said:
    """What ranks compare of a graph.

    Attributes:
        statement: what is the same on all of them.
        places: by the title of a side that has collectives, what ranks have to come to together.
        groups: the names of the process groups of its collectives.
    """

    statement: list[Line] = dataclasses.field(default_factory=list)
    places: dict[str, Place] = dataclasses.field(default_factory=dict)
    groups: frozenset[str] = frozenset()

    @classmethod
    def of(cls, graphs: RewrittenGraphs) -> Said:
        statement = statement_of_graphs(graphs)
        return cls(statement, _places(graphs, statement), frozenset(_groups_of(graphs)))


def statement_of_graphs(graphs: RewrittenGraphs) -> list[Line]:
    """Whether a call has a backward, the collectives of both, and whose gradients; empty without collectives."""
    collectives = [line for side in graphs.sides for line in _collectives(side)] + _asked(graphs)
    collectives += _gradients(graphs) if collectives else []
    call = "a call with a backward" if graphs.backward else "a call without a backward (no_grad, or nothing to train)"
    return [Line(call), *collectives] if collectives else []


def _places(graphs: RewrittenGraphs, statement: list[Line]) -> dict[str, Place]:
    same = [line.text for line in statement]
    read = _units(graphs.forward) or _units(graphs.sides[-1])
    places = {}
    for side in graphs.sides:
        if lines := list(_collectives(side)):
            kind = side.title if graphs.backward or side.title != "forward" else "forward, without a backward,"
            source = next((line.source for line in lines if line.source), "")
            text = f"the {kind} of a graph that reads {_shortened(read)}"
            places[side.title] = Place.of(text, sorted(_groups(side)), same=same, source=source)
    return places


def _units(side: RewrittenGraph) -> list[str]:
    """The units whose parameters or gradients the collectives of a graph send."""
    buckets = [bucket for node in side.graph.nodes if ops.is_collective(node) for bucket in ops.buckets_of(node)]
    return list(dict.fromkeys(map(ops.unit_of_bucket, buckets)))


def _shortened(names: list[str]) -> str:
    return ", ".join(names if len(names) <= _SHOWN else [*names[: _SHOWN - 1], "...", names[-1]])


def _groups_of(graphs: RewrittenGraphs) -> set[str]:
    return {group for side in graphs.sides for group in _groups(side)}


def _groups(side: RewrittenGraph) -> set[str]:
    return {ops.argument(node, "group") for node in side.graph.nodes if ops.is_collective(node)}


def _collectives(side: RewrittenGraph) -> Iterator[Line]:
    for node in side.graph.nodes:
        if ops.is_collective(node):
            name = str(node.target).removeprefix("fsdp.").removesuffix(".default")
            value = node.meta["val"]
            of = f"{ops.argument(node, 'bucket')}{_sent_alone(node)}"
            yield Line(
                f"{name} of {of} in the {side.title}, {value.numel()} elements of "
                f"{str(value.dtype).removeprefix('torch.')} over {ops.argument(node, 'world_size')} ranks",
                source_of(node),
            )


def _asked(graphs: RewrittenGraphs) -> list[Line]:
    """What the ranks ask each other while the backward runs; see `runtime.backward`."""
    if graphs.backward is None or graphs.dependence is None or not graphs.dependence.can_differ:
        return []
    reduced = [each for each in bucket_gradients(graphs.backward.graph) if not each.is_kept]
    number = sum(len(each.offsets) for each in reduced) + len(graphs.dependence.passed_on)
    return [Line(f"which of {number} gradients any rank has, asked in the backward")] if number else []


def _sent_alone(node: torch.fx.Node) -> str:
    """The parameters of a grouped collective, in order: each is a message, and only those that the graph reads are."""
    if node.target is ops.ALL_GATHER_GROUPED:
        names = [ops.argument(out, "parameter") for out in ops.parameters_of(node)]
    elif node.target is ops.REDUCE_SCATTER_GROUPED:
        names = ops.argument(node, "parameters")
    else:
        return ""
    return f" ({', '.join(names)})"


def _gradients(graphs: RewrittenGraphs) -> Iterator[Line]:
    """Whose gradients a backward packs: buckets of the same size may hold those of different parameters."""
    for node in graphs.backward.graph.nodes if graphs.backward else ():
        if ops.is_call(node, ops.PACK):
            names = ", ".join(ops.argument(node, "parameters"))
            yield Line(f"gradients of {names} in the backward", source_of(node))


def source_of(node: torch.fx.Node) -> str:
    """The line of the model that a node comes from; of a collective, that uses what is gathered, or computes what is
    reduced. Empty where it is not known."""
    is_gather = ops.is_all_gather(node)
    seen, found = {node}, [node]
    for each in found:
        frames = _FRAME.findall(each.meta.get("stack_trace") or "")
        if frames := [frame for frame in frames if not frame[0].startswith(_PACKAGE)]:
            path, line, code = frames[-1]
            return f"{path}:{line}: {code.strip()}"
        near = [other for other in (each.users if is_gather else each.all_input_nodes) if other not in seen]
        found += near
        seen.update(near)
    return ""
