"""The rewritten graphs of one compilation, to look at and to test against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch.fx

from .dependence import Dependence
from .passes.pipeline import Pipeline, Side
from .passes.plan import StepPlan
from .passes.printer import print_graph, print_schedule


@dataclasses.dataclass(frozen=True)
class RewrittenGraph:
    """A graph in schedule order, in the dialect of `passes.ops`; `str()` prints it."""

    module: torch.fx.GraphModule
    title: str

    @property
    def graph(self) -> torch.fx.Graph:
        return self.module.graph

    def schedule(self) -> str:
        """Compute and communication side by side, with the bytes of full buffers alive."""
        return print_schedule(self.module, self.title)

    def __str__(self) -> str:
        return print_graph(self.module, self.title)

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class LoweredGraphs:
    """What the compiler receives: torch's functional collectives and ATen, in the order of the schedule."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None


@dataclasses.dataclass(frozen=True)
class RewrittenGraphs:
    """Forward and backward of one compiled graph; `backward` is None where no gradients were asked for.

    `plan` is what was planned for them; None where the schedule follows from the options alone. `dependence` says which
    outputs lead to which gradients; None where all lead to all.
    """

    forward: RewrittenGraph
    backward: RewrittenGraph | None
    lowered: LoweredGraphs
    plan: StepPlan | None = None
    dependence: Dependence | None = None

    @classmethod
    def of(
        cls,
        forward: Side,
        backward: Side | None = None,
        plan: StepPlan | None = None,
        dependence: Dependence | None = None,
    ) -> RewrittenGraphs:
        return cls(
            RewrittenGraph(forward.scheduled, "forward"),
            None if backward is None else RewrittenGraph(backward.scheduled, "backward"),
            LoweredGraphs(forward.lowered, None if backward is None else backward.lowered),
            plan,
            dependence,
        )

    @property
    def sides(self) -> list[RewrittenGraph]:
        """The forward, and the backward if there is one."""
        return [self.forward] if self.backward is None else [self.forward, self.backward]

    def schedule(self) -> str:
        """Both schedules as text."""
        return "\n".join(side.schedule() for side in self.sides)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.sides))


Draft = Callable[[Pipeline, float | None], RewrittenGraphs]
"""The graphs that a pipeline makes of what was captured, with an activation memory budget (None: as it is set); neither
lowered nor verified."""


@dataclasses.dataclass(frozen=True)
class ShortDraft:
    """Drafts of a program with fewer of its equal units.

    Attributes:
        part: of all units, those that are left.
    """

    draft: Draft
    part: float


Shorten = Callable[[int], ShortDraft | None]
"""Drafts of the same program with so many of its equal units; None where it has less than twice as many."""
