"""Work: the scheduled graphs of a step and their kernels, found once for everything that is predicted from them.

Graphs may be traced with symbolic sizes. Predictions are made for the sizes that they were traced with, on copies: the
number of a symbolic size adds a guard to the graph that is being compiled, or to the next one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ..graphs import RewrittenGraph, RewrittenGraphs
from ..runtime.shapes import SYMBOLIC, hint, is_symbolic
from .nodes import Compiler, Kernel, kernels_of


@dataclasses.dataclass(frozen=True)
class WorkOfGraph:
    """One graph in schedule order, of concrete sizes, and its kernels."""

    title: str
    graph: torch.fx.Graph
    kernels: Sequence[Kernel]

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)

    @property
    def collectives(self) -> list[Kernel]:
        """The kernels that are collectives of the model itself."""
        return [kernel for kernel in self.kernels if kernel.collective is not None]


@dataclasses.dataclass(frozen=True)
class Work:
    """Forward and backward; `backward` is None where no gradients were asked for."""

    forward: WorkOfGraph
    backward: WorkOfGraph | None
    compiler: Compiler

    @classmethod
    def of(cls, graphs: RewrittenGraphs, *, compiler: Compiler) -> Work:
        """The work of these graphs, which may still be compiled.

        Args:
            compiler: what compiles them; see `nodes.Compiler`.
        """

        def side(rewritten: RewrittenGraph) -> WorkOfGraph:
            graph = concrete(rewritten.graph)
            return WorkOfGraph(rewritten.title, graph, kernels_of(graph, compiler=compiler))

        return cls(side(graphs.forward), None if graphs.backward is None else side(graphs.backward), compiler)

    @property
    def sides(self) -> list[WorkOfGraph]:
        return [side for side in (self.forward, self.backward) if side is not None]


def concrete(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph itself if all of its sizes are numbers; otherwise a copy whose values have the sizes of the trace."""
    if not any(_is_symbolic(node.meta.get("val")) for node in graph.nodes):
        return graph
    copied = copy.deepcopy(graph)
    for node in copied.nodes:
        if _is_symbolic(node.meta.get("val")):
            node.meta["val"] = _concrete(node.meta["val"])
    return copied


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    if isinstance(value, torch.Tensor):
        return is_symbolic(value)
    return isinstance(value, SYMBOLIC)


def _concrete(value: Any) -> Any:
    """The value without symbols."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_concrete, value))
    if isinstance(value, torch.Tensor) and _is_symbolic(value):
        sizes, strides = ([_concrete(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return value.new_empty_strided(sizes, strides)
    return hint(value) if isinstance(value, SYMBOLIC) else value
