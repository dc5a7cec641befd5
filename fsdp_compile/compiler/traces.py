"""Traces: what a call of a model was traced as, to be rewritten for other options, plans and ranks.

Tracing takes most of the time, and is the same for any number of ranks: their layouts differ in arguments of operators
and in the sizes of shards (`passes/new_layout.py`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.fx

from ..dependence import Dependence, Slot
from ..graphs import Draft, RewrittenGraphs, ShortDraft, Shorten
from ..layout.buckets import NO_AXIS, Layout
from ..passes import ops
from ..passes.halves import copy_of
from ..passes.new_layout import NewLayout
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..progress import phase
from .garbage import postponed
from .splits import Splits

MakePlan = Callable[[str, Draft, Shorten], StepPlan | None]
"""(program, draft, shorten) to the plan of a program; `step_plans.Planner.plan` explains them."""


@contextmanager
def rewriting() -> Iterator[None]:
    """Graphs are rewritten inside."""
    with postponed(), phase("rewriting"):
        yield


def program(kind: str, graph: torch.fx.Graph) -> str:
    """What a plan is made for, as JSON: its kind, and the parameters in the order in which they are read.

    The shapes of inputs are not in it.
    """
    return json.dumps([kind, *_parameters(graph)])


def _parameters(graph: torch.fx.Graph) -> list[str]:
    return [ops.argument(node, "parameter") for node in graph.nodes if ops.is_call(node, ops.UNSHARD)]


@dataclasses.dataclass(frozen=True)
class Trace:
    """A call as it was traced; it is left as it is.

    Attributes:
        program: see `program`.
        graph: of a call that needs no gradients; otherwise what makes halves of a joint graph.
        dependence: see `RewrittenGraphs`.
    """

    program: str
    graph: torch.fx.GraphModule | Splits
    dependence: Dependence | None = None

    def rewritten(
        self,
        pipeline: Callable[[StepPlan | None], Pipeline],
        make_plan: MakePlan | None = None,
        *,
        lowers: bool = True,
    ) -> RewrittenGraphs:
        """The graphs that the pipeline makes of it, for the plan that is made of drafts.

        Args:
            lowers: whether they are lowered, too, and verified after every pass, not in the end alone.
        """
        with rewriting():
            plan = None if make_plan is None else self.plan(make_plan)
            run = pipeline(plan)
            if isinstance(self.graph, torch.fx.GraphModule):
                rewrite = run.rewrite_inference if lowers else run.schedule_inference
                return RewrittenGraphs.of(rewrite(copy_of(self.graph)), plan=plan)
            halves = self.graph.of(plan.activations if plan else None).copies()
            sides = run.rewrite_halves(halves) if lowers else run.schedule_halves(halves)
            return RewrittenGraphs.of(*sides, plan, self.dependence)

    def plan(self, make_plan: MakePlan) -> StepPlan | None:
        """What `make_plan` plans for it."""
        return make_plan(self.program, self.draft, self.shorten)

    def shorten(self, num_units: int) -> ShortDraft | None:
        """See `graphs.Shorten`."""
        if isinstance(self.graph, torch.fx.GraphModule) or (shortened := self.graph.shortened(num_units)) is None:
            return None
        splits, part = shortened
        return ShortDraft(dataclasses.replace(self, graph=splits).draft, part)

    def lengthened(self, num_traced: int, names: Sequence[str], layouts: Sequence[Layout]) -> Trace | None:
        """Of a model with so many equal layers, where so few were traced; None where it cannot be told from these.

        Args:
            num_traced: the first so many of all layers were.
            names: of all of them; each is a unit.
            layouts: of the whole model.
        """
        if isinstance(self.graph, torch.fx.GraphModule) or _of_other_inputs(self.dependence):
            return None
        if (found := self.graph.lengthened(num_traced, names)) is None:
            return None
        splits, originals = found
        parameters = [slot.parameter for layout in layouts for slot in layout.slots]
        if sorted(_parameters(splits.joint.graph)) != sorted(parameters):
            return None
        graph, dependence = splits.joint.graph, self.dependence
        if dependence is not None:
            dependence = _of_units(dependence, dict(zip(names, originals, strict=True)), layouts)
        return Trace(program("training", graph), splits, dependence)

    def draft(self, pipeline: Pipeline, activations: float | None) -> RewrittenGraphs:
        """See `graphs.Draft`."""
        if isinstance(self.graph, torch.fx.GraphModule):
            return RewrittenGraphs.of(pipeline.draft_inference(copy_of(self.graph)))
        return RewrittenGraphs.of(*pipeline.draft_halves(self.graph.of(activations).copies()))

    def laid_out(self, layout: NewLayout, dependence: Dependence | None) -> Trace:
        """As it would have been traced with another layout, by which `dependence` names parameters."""
        if not isinstance(self.graph, torch.fx.GraphModule):
            return dataclasses.replace(self, graph=self.graph.laid_out(layout), dependence=dependence)
        copied = copy_of(self.graph)
        layout.change_graph(copied.graph)
        return dataclasses.replace(self, graph=copied, dependence=dependence)


class Traces:
    """The traces of one call of one model by the same options, for the layouts that it was traced with."""

    def __init__(self) -> None:
        self._found: list[tuple[Sequence[Layout], Trace]] = []

    def of(self, layouts: Sequence[Layout], make: Callable[[], Trace]) -> Trace:
        """The trace of the call with these layouts, `make()` only if none that was made can be laid out so."""
        for traced, trace in self._found:
            if _differ_in_ranks_only(traced, layouts):
                return _laid_out(trace, traced, layouts)
        trace = make()
        self._found.append((layouts, trace))
        return trace


def _differ_in_ranks_only(some: Sequence[Layout], others: Sequence[Layout]) -> bool:
    """Whether a call is traced alike with both; the parts of another dimension than the first are put together."""
    has_rows = all(slot.dim == 0 for layout in (*some, *others) for slot in layout.slots)
    return has_rows and list(map(_without_ranks, some)) == list(map(_without_ranks, others))


def _without_ranks(layout: Layout) -> Layout:
    slots = tuple(dataclasses.replace(slot, offset=0) for slot in layout.slots)
    return dataclasses.replace(layout, slots=slots, numel=0, shards=NO_AXIS, replicas=NO_AXIS)


def _laid_out(trace: Trace, traced: Sequence[Layout], layouts: Sequence[Layout]) -> Trace:
    arguments = {slot.parameter: layout.unshard_arguments(slot) for layout in layouts for slot in layout.slots}
    new_layout = NewLayout(arguments, {layout.bucket: layout.numel for layout in layouts})
    if (dependence := trace.dependence) is not None:
        new_slot = dict(zip(_slots(traced), _slots(layouts), strict=True))
        results_of = {
            key if isinstance(key, int) else new_slot[key]: results for key, results in dependence.results_of.items()
        }
        dependence = dataclasses.replace(dependence, results_of=results_of)
    return trace.laid_out(new_layout, dependence)


def _slots(layouts: Sequence[Layout]) -> list[tuple[str, int]]:
    """As `Dependence` names parameters."""
    return [(layout.bucket, slot.offset) for layout in layouts for slot in layout.slots]


def _of_other_inputs(dependence: Dependence | None) -> bool:
    """Whether gradients lead to inputs that are no shards, which are counted among all inputs."""
    return dependence is not None and any(isinstance(key, int) for key in dependence.results_of)


def _of_units(dependence: Dependence, original_of: Mapping[str, str], layouts: Sequence[Layout]) -> Dependence:
    """Of units of other names, each of which depends on what its original does."""
    results_of: dict[Slot | int, frozenset[int]] = {}
    for bucket, offset in _slots(layouts):
        unit = ops.unit_of_bucket(bucket)
        original = ops.bucket_of_unit(original_of.get(unit, unit), ops.kind_of_bucket(bucket))
        if (original, offset) in dependence.results_of:
            results_of[bucket, offset] = dependence.results_of[original, offset]
    return Dependence(results_of, frozenset())
