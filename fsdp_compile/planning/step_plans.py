"""Plans of steps: which is fastest by what the cost model says of it, within a limit of bytes.

1. What the model itself sends is decomposed, if that is faster (`pieces.py`).
2. The graphs are rewritten once with every unit freed after the forward; `chains_of_graphs.py` plans by what they say.
3. Its best plan, and the best one that keeps all units, are rewritten and predicted in full, and so is what the user
   asked for without a plan. The fastest that fits is taken.
4. Where memory is what limits it, all of this is done again for programs that save less and compute more.

Where units are equal, such as the layers of a transformer, and memory does not limit the speed, this is done for a
program with few of them, and the whole program gets a plan of the kind that wins there.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..costs.hardware import Hardware
from ..costs.memory import CATEGORIES
from ..costs.nodes import Compiler
from ..costs.predict import Prediction, bytes_text, predict
from ..errors import ConfigError
from ..graphs import Draft, RewrittenGraphs, ShortDraft, Shorten
from ..passes import ops
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..progress import phase
from ..runtime.comparison import Statement
from .chains_of_graphs import SAME, Estimate, StepChains
from .kept_plans import keep_plan, kept_plan, name_of
from .pieces import best_pieces, may_pay

MARGIN = 0.05
"""The part of a memory budget that plans leave: predictions of the peak are within so much of what is measured."""

_UNDER_WAY = (2, 4)  # numbers of reductions at once that are tried besides one
EQUAL_UNITS = 6  # that are left of the equal ones in a short program
_TRIES = 3  # limits that plans are made for, until one fits
_SURE = 1.03  # what a plan that nobody asked for has to win: predictions are no better than that
_WORTH_IT = 1.02  # what there has to be won for other activations to be tried: torch's partitioner takes long for them
_ACTIVATIONS = (0.75, 0.5, 0.25)  # activation memory budgets that are tried where memory is short


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a plan is for.

    Attributes:
        memory_budget: bytes that a rank may hold during a step; None for all that the hardware has.
        compiler: what compiles the graphs; see `costs.nodes.Compiler`.
        is_within_plain: whether the peak may be no higher than without a plan, which is also what is left where a plan
            wins little.
    """

    hardware: Hardware
    memory_budget: int | None
    compiler: Compiler
    is_within_plain: bool = False

    @property
    def limit(self) -> int:
        """Bytes that a predicted peak may have."""
        return int((self.memory_budget or self.hardware.memory) * (1 - MARGIN))


@dataclasses.dataclass(frozen=True)
class Leeway:
    """What the user's options leave open.

    Attributes:
        pipeline: the passes for a plan, or without one for None.
        base: the passes that free every unit and pack nothing.
        forms: whether buckets may be packed, and not.
        fixed: units that are kept, or not, because the user said so.
        activations: whether what is saved is open, or torch's activation memory budget has been set.
        in_pieces: the same with a number of pieces that the model's own collectives are decomposed into; None where the
            user has said how many.
    """

    pipeline: Callable[[StepPlan | None], Pipeline]
    base: Pipeline
    forms: Sequence[bool]
    fixed: Mapping[str, bool]
    activations: bool = True
    in_pieces: Callable[[int], Leeway] | None = None


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan (None: as without one) and what it is predicted to take."""

    plan: StepPlan | None
    prediction: Prediction

    @property
    def peak(self) -> int:
        return self.prediction.peak.total


def find_plan(
    draft: Draft, leeway: Leeway, goal: Goal, unplanned: RewrittenGraphs, shorten: Shorten | None = None
) -> Found:
    """The fastest plan that fits, or what the user asked for where that is as fast.

    Args:
        unplanned: the graphs as they are without a plan.
        shorten: see `graphs.Shorten`; without it, all is searched for in the whole program.

    Raises:
        ConfigError: no plan fits into a memory budget. Without one, what needs least is returned.
    """

    def predicted(graphs: RewrittenGraphs) -> Prediction:
        return predict(graphs, goal.hardware, compiler=goal.compiler)

    plain = Found(None, predicted(unplanned))
    if (decompose := leeway.in_pieces) is not None and may_pay(plain.prediction):
        tried = (shorten(EQUAL_UNITS) if shorten else None) or ShortDraft(draft, 1.0)
        pieces = best_pieces(lambda pieces: predicted(tried.draft(decompose(pieces).pipeline(None), None)))
        in_pieces = decompose(pieces)
        decomposed = Found(None, predicted(draft(in_pieces.pipeline(None), None))) if pieces > 1 else plain
        limit, sure = (plain.peak, _SURE) if goal.is_within_plain else (max(plain.peak, goal.limit), 1.0)
        if decomposed.peak <= limit and plain.prediction.seconds > sure * decomposed.prediction.seconds:
            found = _fastest(draft, in_pieces, goal, decomposed, shorten)
            plan = dataclasses.replace(found.plan or StepPlan.as_asked(pieces), pieces=pieces)
            return dataclasses.replace(found, plan=plan)
    return _fastest(draft, leeway, goal, plain, shorten)


def _fastest(draft: Draft, leeway: Leeway, goal: Goal, plain: Found, shorten: Shorten | None) -> Found:
    """As `find_plan`, for what is open besides the pieces; `plain` is without a plan."""
    if goal.is_within_plain and plain.prediction.seconds <= _SURE * _of_the_model(plain.prediction):
        return plain
    program = _Program(draft, leeway, goal, plain.peak if goal.is_within_plain else goal.limit)
    may_keep_all = not goal.is_within_plain
    short = shorten(EQUAL_UNITS) if shorten and may_keep_all else None
    found = None if short is None else program.as_in_short(plain, short)
    candidates = program.candidates(plain, program.step(None)) if found is None else [plain, found]
    if (best := program.best_of(candidates)) is not None:
        is_lost = goal.is_within_plain and plain.prediction.seconds <= _SURE * best.prediction.seconds
        return plain if is_lost else best
    least = min(candidates, key=lambda found: found.peak)
    if goal.memory_budget is not None:
        raise ConfigError(_what_is_missing(least, goal))
    return least


@dataclasses.dataclass(frozen=True)
class _Program:
    """What is planned: its graphs for any plan, what for, and the bytes that a peak may have."""

    draft: Draft
    leeway: Leeway
    goal: Goal
    limit: int

    def step(self, activations: float | None) -> StepChains:
        """What plans with this activation memory budget are made from."""
        graphs = self.draft(self.leeway.base, activations)
        leeway, goal = self.leeway, self.goal
        return StepChains.of(graphs, goal.hardware, goal.compiler, forms=leeway.forms, fixed=leeway.fixed)

    def found(self, plan: StepPlan | None) -> Found:
        """What the plan takes, predicted in full."""
        graphs = self.draft(self.leeway.pipeline(plan), plan.activations if plan else None)
        return Found(plan, predict(graphs, self.goal.hardware, compiler=self.goal.compiler))

    def best_of(self, candidates: Sequence[Found]) -> Found | None:
        """The fastest that fits; of those as fast, the one with the lowest peak. None if none fits."""
        fitting = [found for found in candidates if found.peak <= self.limit]
        fastest = min((found.prediction.seconds for found in fitting), default=0.0)
        as_fast = [found for found in fitting if found.prediction.seconds <= SAME * fastest]
        return min(as_fast, key=lambda found: found.peak, default=None)

    def candidates(self, plain: Found, step: StepChains) -> list[Found]:
        """`plain`, and plans that may be faster; `step` is what those for these activations are made from."""
        best = step.best(self.limit)
        found = [plain, *self.planned(step, best, None)]
        may_change = self.leeway.activations and not self.goal.is_within_plain and step.least <= self.limit
        if not may_change or not _is_short(step, best, found, self.limit):
            return found
        for activations in _ACTIVATIONS:
            step = self.step(activations)
            seconds = [each.prediction.seconds for each in found if each.peak <= self.limit]
            if step.compute >= min(seconds, default=math.inf):
                break  # what is computed again costs more than memory would gain; with fewer activations, even more
            before, best = _seconds(best), step.best(self.limit)
            if _seconds(best) > before:
                break
            found += self.planned(step, best, activations)
            if before < _WORTH_IT * _seconds(best) < math.inf:
                break  # another such step wins less
        return found

    def as_in_short(self, plain: Found, short: ShortDraft) -> Found | None:
        """What the whole program takes by the kind of plan that wins in the short one.

        None where memory limits the speed: how much of what is kept, and what is computed again, then depends on all
        units. The bytes that plans may use besides those of `plain` are shared out by units.
        """
        unplanned = short.draft(self.leeway.pipeline(None), None)
        short_plain = Found(None, predict(unplanned, self.goal.hardware, compiler=self.goal.compiler))
        limit = short_plain.peak + int(short.part * (self.limit - plain.peak))
        program = dataclasses.replace(self, draft=short.draft, limit=limit)
        step = program.step(None)
        if step.with_kept(len(step.open_units), limit) is None:
            return None
        best = program.best_of(program.candidates(short_plain, step))
        if best is None or best.plan is None:
            return plain if best is short_plain else None
        kind, keeps_all = best.plan, len(best.plan.kept or ()) == len(step.always_kept) + len(step.open_units)
        if kind.activations is not None or kind.reductions == 0:
            return None
        step = self.step(None)
        estimate = step.with_kept(len(step.open_units), self.limit) if keeps_all else step.best(self.limit)
        if estimate is None:
            return None
        plan = dataclasses.replace(estimate.plan, reductions=kind.reductions)
        if not kind.forward and not kind.backward:
            plan = dataclasses.replace(plan, forward=(), backward=())
        found = self.found(plan)
        return found if found.peak <= self.limit else None

    def planned(self, step: StepChains, best: Estimate | None, activations: float | None) -> list[Found]:
        """Plans for these activations: one that fits if there is any, and what else may be faster.

        Args:
            best: the step's best plan within the limit.
        """
        tried: list[Found] = []
        limit = self.limit
        while best is not None:
            plan = dataclasses.replace(best.plan, activations=activations)
            tried.append(self.found(plan))
            excess = tried[-1].peak - self.limit
            if excess <= 0:
                reduced = self._reduced(tried[-1], plan) if step.has_reductions else ()
                kept = list(self._kept(step, plan, limit))
                return [*tried, *reduced, *kept, *self._not_cut([tried[-1], *kept])]
            limit -= excess  # the chains do not see all that is in memory
            best = step.best(limit) if len(tried) < _TRIES else None
        return [*tried, self.found(dataclasses.replace(step.leanest(), activations=activations))]

    def _reduced(self, found: Found, plan: StepPlan) -> Iterator[Found]:
        """The plan with more reductions under way, as long as that is worth it."""
        for number in _UNDER_WAY:
            seconds = found.prediction.seconds
            if SAME * (seconds - _waited_for_reductions(found.prediction)) >= seconds:
                return
            found = self.found(dataclasses.replace(plan, reductions=number))
            yield found
            if found.prediction.seconds * SAME >= seconds:
                return

    def _kept(self, step: StepChains, plan: StepPlan, limit: int) -> Iterator[Found]:
        """The best plan that keeps all units, if this one does not."""
        most = len(step.open_units)
        if len(plan.kept or ()) < len(step.always_kept) + most and (other := step.with_kept(most, limit)):
            yield self.found(dataclasses.replace(other.plan, activations=plan.activations))

    def _not_cut(self, planned: Sequence[Found]) -> Iterator[Found]:
        """What these keep, gathered as without a plan: the chains that gathers are cut by are not all of a step."""
        for found in planned:
            if found.plan is not None and found.plan.kept:
                yield self.found(dataclasses.replace(found.plan, forward=(), backward=()))


def _is_short(step: StepChains, best: Estimate | None, candidates: Sequence[Found], limit: int) -> bool:
    """Whether there would be a faster plan with more memory; `best` is within the limit."""
    if best is None or not any(found.peak <= limit for found in candidates):
        return True
    if step.most <= limit:
        return False
    unlimited = step.best(sys.maxsize)
    return unlimited is not None and best.seconds > _WORTH_IT * unlimited.seconds


def _seconds(estimate: Estimate | None) -> float:
    return math.inf if estimate is None else estimate.seconds


def _of_the_model(prediction: Prediction) -> float:
    """Seconds of what the model computes and of the optimizer, which no plan changes."""
    kernels = [kernel for side in prediction.work.sides for kernel in side.kernels]
    computed = [kernel for kernel in kernels if not all(map(ops.is_dialect, kernel.nodes))]
    return prediction.optimizer_seconds + sum(kernel.seconds(prediction.hardware) for kernel in computed)


def _waited_for_reductions(prediction: Prediction) -> float:
    """Seconds that compute stands still for reductions while there is more to compute."""
    if prediction.work.backward is None:
        return 0.0
    exposed, waited = prediction.timeline.exposed, 0.0
    kernels = {kernel.nodes[-1] for kernel in prediction.work.backward.kernels}
    so_far = 0.0
    for node in prediction.work.backward.graph.nodes:
        if node in exposed and ops.is_reduction(node.all_input_nodes[0]):
            so_far += exposed[node]
        elif node in kernels:
            waited = so_far
    return waited


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans the graphs of one model: each program once, whatever its inputs' shapes, and alike on all ranks.

    Attributes:
        plans: those made so far, by program; None for what needs no plan.
        statement: what ranks compare of the graphs without a plan, before the first decides for them.
        decide: (that statement, what to do) to what the first rank's doing of it returned.
        undecided: the statements of the programs that were planned so far.
        keeps: whether plans are kept for the next start, and taken from the last.
    """

    leeway: Leeway
    goal: Goal
    plans: dict[str, StepPlan | None] = dataclasses.field(default_factory=dict)
    statement: Callable[[RewrittenGraphs], Statement] = lambda unplanned: ()
    decide: Callable[[Statement, Callable[[], str]], str] = lambda statement, make: make()
    undecided: dict[str, Statement] = dataclasses.field(default_factory=dict)
    keeps: bool = False

    @property
    def conditions(self) -> tuple[object, ...]:
        """What plans follow from besides the graphs; its text says all of it."""
        leeway = self.leeway
        pipelines, is_open = (leeway.base, leeway.pipeline(None)), leeway.in_pieces is not None
        return self.goal, *pipelines, leeway.forms, leeway.fixed, leeway.activations, is_open

    def plan(self, program: str, draft: Draft, shorten: Shorten) -> StepPlan | None:
        """The plan of a program, which is the parameters that it reads in order, and whether it has a backward.

        `draft` and `shorten` are explained by `graphs`.

        Raises:
            ConfigError: no plan fits into the memory budget, or for these shapes the one does not that was made.
        """
        if program not in self.plans:
            unplanned = draft(self.leeway.pipeline(None), None)
            self._decide(program, self.statement(unplanned), lambda: self._made(draft, unplanned, shorten))
        plan = self.plans[program]
        if self.goal.memory_budget is not None:
            found = _Program(draft, self.leeway, self.goal, self.goal.limit).found(plan)
            if found.peak > self.goal.limit:
                raise ConfigError(_what_is_missing(found, self.goal))
        return plan

    def takes(self, program: str, undecided: Statement, plan: StepPlan | None) -> bool:
        """Whether a plan that an earlier start has made for a call of this program is the one that ranks follow.

        What is not planned yet is decided as in `plan`: other ranks may come from there.
        """
        if program not in self.plans:
            self._decide(program, undecided, lambda: _text_of(plan))
        return self.plans[program] == plan

    def _decide(self, program: str, undecided: Statement, make: Callable[[], str]) -> None:
        made = self.decide(undecided, make)
        self.plans[program] = StepPlan.from_json(made) if made else None
        self.undecided[program] = undecided

    def _made(self, draft: Draft, unplanned: RewrittenGraphs, shorten: Shorten) -> str:
        with phase("planning") as planning:
            name = name_of(unplanned, *self.conditions) if self.keeps else None
            is_kept, plan = (False, None) if name is None else kept_plan(name)
            if is_kept:
                planning.remark = " (from the cache)"
            else:
                plan = find_plan(draft, self.leeway, self.goal, unplanned, shorten).plan
                if name is not None:
                    keep_plan(name, plan)
        return _text_of(plan)


def _text_of(plan: StepPlan | None) -> str:
    return plan.to_json() if plan else ""


def _what_is_missing(found: Found, goal: Goal) -> str:
    peak = found.prediction.peak
    held = sorted(((peak.held[name], name) for name in CATEGORIES if peak.held[name]), reverse=True)
    listed = ", ".join(f"{name} {bytes_text(size)}" for size, name in held)
    helping = list(dict.fromkeys(text for _, name in held for text in _HELPS.get(name, ())))
    budget, missing, least, most = map(
        bytes_text, (goal.memory_budget or 0, found.peak - goal.limit, found.peak, goal.limit)
    )
    return (
        f"memory_budget of {budget}: {missing} are missing. The plan that needs least takes {least} at its peak, in "
        f"the {peak.side} ({listed}), of {most} that may be planned: {MARGIN:.0%} are left for what predictions miss. "
        f"What would help: {', or '.join(helping[:3])}"
    )


_HELPS = {
    "shards": ("more ranks to shard over", "offload_policy"),
    "optimizer": ("more ranks to shard over", "an optimizer with fewer states"),
    "gradients": ("more ranks to shard over",),
    "gathered": ("smaller units (auto_wrap_policy)",),
    "reductions": ("smaller units (auto_wrap_policy)",),
    "activations": ("fewer rows a rank", "activation checkpointing"),
    "temporaries": ("fewer rows a rank",),
    "inputs": ("fewer rows a rank",),
}
