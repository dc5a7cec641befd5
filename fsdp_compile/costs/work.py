"""Work: the scheduled graphs of a step and their kernels, found once for everything that is predicted from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch.fx

from ..graphs import RewrittenGraph, RewrittenGraphs
from .nodes import Compiler, Kernel, kernels_of


@dataclasses.dataclass(frozen=True)
class WorkOfGraph:
    """One graph in schedule order, and its kernels."""

    title: str
    graph: torch.fx.Graph
    kernels: Sequence[Kernel]

    @property
    def flops(self) -> float:
        return sum(kernel.flops for kernel in self.kernels)


@dataclasses.dataclass(frozen=True)
class Work:
    """Forward and backward; `backward` is None where no gradients were asked for."""

    forward: WorkOfGraph
    backward: WorkOfGraph | None
    compiler: Compiler

    @classmethod
    def of(cls, graphs: RewrittenGraphs, *, compiler: Compiler) -> Work:
        """The work of these graphs.

        Args:
            compiler: what compiles them; see `nodes.Compiler`.
        """

        def side(rewritten: RewrittenGraph) -> WorkOfGraph:
            return WorkOfGraph(rewritten.title, rewritten.graph, kernels_of(rewritten.graph, compiler=compiler))

        return cls(side(graphs.forward), None if graphs.backward is None else side(graphs.backward), compiler)

    @property
    def sides(self) -> list[WorkOfGraph]:
        return [side for side in (self.forward, self.backward) if side is not None]
