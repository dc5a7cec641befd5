"""Scheduling: the plan of a step, by what the cost model says of it, within a limit of bytes.

    1. The graphs are rewritten once with every unit freed after the forward: what computes when, what is in memory
       anyway, what is gathered and reduced is read from them, as one chain for each direction.
    2. Which units stay gathered between forward and backward: those that the forward uses last, as many as pay and
       fit. They are in memory for the shortest time, and their gathers are those that the backward waits for first.
    3. For each choice of those, `planning.best_plan` cuts the rest into gathers and says when each starts.
    4. The best ones are rewritten and predicted in full, and so is what the user asked for without a plan. The fastest
       that fits is taken.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch.fx

from .chains import Chain, Channel, Outcome, Parameter, Reduction, evaluate
from .chains import Plan as ChainPlan
from .costs import collectives
from .costs.collectives import Ring
from .costs.hardware import Hardware
from .costs.memory import CATEGORIES, Moment
from .costs.nodes import Compiler, full_bytes, kernels_of, num_bytes
from .costs.predict import Prediction, predict, rings_of
from .costs.timeline import seconds_of
from .errors import ConfigError
from .graphs import RewrittenGraphs
from .passes import ops
from .passes.pipeline import Pipeline
from .passes.plan import Gather, StepPlan
from .passes.prefetch_all_gather import first_uses
from .planning import best_plan

MARGIN = 0.05
"""The part of a memory budget that plans leave: predictions of the peak are within so much of what is measured."""

_SLACK = 2.0  # gathers start early enough for messages that take twice as long as predicted
_SAME = 1.001  # plans within this factor are as fast as each other; then the one with the lower peak is better
_UNDER_WAY = (1, 2, 4)  # numbers of reductions at once that are tried
_SIZES = 12  # numbers of kept units that are tried at first

Draft = Callable[[Pipeline], RewrittenGraphs]
"""The graphs that a pipeline makes of what was captured; neither lowered nor verified."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a plan is for.

    Attributes:
        memory_budget: bytes that a rank may hold during a step; None for all that the hardware has.
        compiler: what compiles the graphs; see `costs.nodes.Compiler`.
    """

    hardware: Hardware
    memory_budget: int | None
    compiler: Compiler

    @property
    def limit(self) -> int:
        """Bytes that a predicted peak may have."""
        return int((self.memory_budget or self.hardware.memory) * (1 - MARGIN))


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user's options leave open.

    Attributes:
        pipeline: the passes for a plan, or without one for None.
        base: the passes that free every unit and pack nothing.
        forms: whether buckets may be packed, and not.
        fixed: units that are kept, or not, because the user said so.
    """

    pipeline: Callable[[StepPlan | None], Pipeline]
    base: Pipeline
    forms: Sequence[bool]
    fixed: Mapping[str, bool]


@dataclasses.dataclass(frozen=True)
class Found:
    """A plan (None: as without one) and what it is predicted to take."""

    plan: StepPlan | None
    prediction: Prediction

    @property
    def peak(self) -> int:
        return self.prediction.memory.peak.total


def find_plan(draft: Draft, options: Options, goal: Goal) -> Found:
    """The fastest plan that fits, or what the user asked for where that is as fast.

    Raises:
        ConfigError: no plan fits into a memory budget. Without one, what needs least is returned.
    """
    step = _Step.of(draft(options.base), goal)
    candidates = [_found(None, draft, options, goal)]
    limit = goal.limit
    for _ in range(3):
        if (plan := _best(step, options, limit)) is None:
            break
        planned = [_found(plan, draft, options, goal)]
        if step.backward is not None and step.backward.reductions:
            more = [dataclasses.replace(plan, reductions=number) for number in _UNDER_WAY[1:]]
            planned += [_found(each, draft, options, goal) for each in more]
        candidates += planned
        excess = min(found.peak for found in planned) - goal.limit
        if excess <= 0:
            break
        limit -= excess
    fitting = [found for found in candidates if found.peak <= goal.limit]
    if not fitting:
        candidates.append(_found(_lean(step, options), draft, options, goal))
        least = min(candidates, key=lambda found: found.peak)
        if least.peak > goal.limit and goal.memory_budget is not None:
            raise ConfigError(_what_is_missing(least, goal))
        return least
    fastest = min(found.prediction.seconds for found in fitting)
    return min((found for found in fitting if found.prediction.seconds <= _SAME * fastest), key=lambda f: f.peak)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans the graphs of one model: each program once, whatever its inputs' shapes, and alike on all ranks.

    Attributes:
        plans: those made so far, by program; None for what needs no plan.
        agree: (name, what to do) to what the first rank's doing of it returned.
    """

    options: Options
    goal: Goal
    plans: dict[str, StepPlan | None]
    agree: Callable[[str, Callable[[], str]], str]

    def plan(self, program: str, draft: Draft) -> StepPlan | None:
        """The plan of a program, which is the parameters that it reads in order, and whether it has a backward.

        Raises:
            ConfigError: no plan fits into the memory budget, or for these shapes the one does not that was made.
        """
        if program not in self.plans:
            answer = json.loads(self.agree(program, lambda: self._made(draft)))
            if "error" in answer:
                raise ConfigError(answer["error"])
            self.plans[program] = StepPlan.from_json(answer["plan"]) if answer["plan"] else None
        plan = self.plans[program]
        if self.goal.memory_budget is not None:
            found = _found(plan, draft, self.options, self.goal)
            if found.peak > self.goal.limit:
                raise ConfigError(_what_is_missing(found, self.goal))
        return plan

    def _made(self, draft: Draft) -> str:
        try:
            plan = find_plan(draft, self.options, self.goal).plan
        except ConfigError as e:
            return json.dumps({"error": str(e)})
        return json.dumps({"plan": plan and plan.to_json()})


def _found(plan: StepPlan | None, draft: Draft, options: Options, goal: Goal) -> Found:
    graphs = draft(options.pipeline(plan))
    return Found(plan, predict(graphs, goal.hardware, compiler=goal.compiler))


def _what_is_missing(found: Found, goal: Goal) -> str:
    peak = found.prediction.memory.peak
    held = sorted(((peak.held[name], name) for name in CATEGORIES if peak.held[name]), reverse=True)
    listed = ", ".join(f"{name} {_mib(size)}" for size, name in held)
    helping = [_HELPS[name] for _, name in held if name in _HELPS]
    return (
        f"memory_budget of {_mib(goal.memory_budget or 0)}: {_mib(found.peak - goal.limit)} are missing. The plan that "
        f"needs least takes {_mib(found.peak)} at its peak, in the {peak.side} ({listed}), and {_mib(goal.limit)} may be "
        f"planned: {MARGIN:.0%} are left for what predictions miss. What would help: {'; '.join(helping[:2])}"
    )


_HELPS = {
    "shards": "more ranks to shard over, or offload_policy",
    "optimizer": "more ranks to shard over, or an optimizer with fewer states",
    "gradients": "more ranks to shard over",
    "gathered": "smaller units (auto_wrap_policy)",
    "reductions": "smaller units (auto_wrap_policy)",
    "activations": "fewer rows a rank, or activation checkpointing",
    "temporaries": "fewer rows a rank",
    "inputs": "fewer rows a rank",
}


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


# ---------------------------------------------------------------------------------------------------------------
# What the graphs say
# ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Atom:
    """A bucket that is gathered; what is planned as one."""

    bucket: str
    parameter: Parameter

    @property
    def unit(self) -> str:
        return ops.unit_of_bucket(self.bucket)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One direction: compute between the first uses of parameters.

    Attributes:
        starts: of each compute step the parameter that is first used at its beginning; None for the first of all.
        held: bytes that are in memory during each step besides what is gathered.
    """

    starts: Sequence[str | None]
    seconds: Sequence[float]
    held: Sequence[int]
    atoms: Sequence[_Atom]
    reductions: Sequence[Reduction]

    @classmethod
    def of(cls, graph: torch.fx.Graph, moments: Sequence[Moment], rings: Mapping[str, Ring], goal: Goal) -> _Side:
        begins: dict[torch.fx.Node, str | None] = {}
        for parameter, node in first_uses(graph).items():
            begins.setdefault(node, parameter)
        starts: list[str | None] = [None]
        step_of: dict[torch.fx.Node, int] = {}
        for node in graph.nodes:
            if node in begins:
                starts.append(begins[node])
            step_of[node] = len(starts) - 1
        seconds, held = [0.0] * len(starts), [0] * len(starts)
        for kernel in kernels_of(graph, compiler=goal.compiler):
            if not all(map(ops.is_dialect, kernel.nodes)) or ops.is_call(kernel.nodes[0], ops.PACK):
                seconds[step_of[kernel.nodes[-1]]] += kernel.seconds(goal.hardware)
        for moment in moments:
            step = step_of[moment.node]
            held[step] = max(held[step], moment.total - moment.held["gathered"])
        atoms = sorted(_atoms(graph, step_of), key=lambda atom: atom.parameter.first)
        groups = {ops.argument(node, "group") for node in graph.nodes if ops.is_all_gather(node)}
        reductions = [
            Reduction(seconds_of(node, rings[ops.argument(node, "group")], goal.hardware), step_of[node])
            for node in graph.nodes
            if ops.is_reduction(node) and ops.argument(node, "group") in groups
        ]
        return cls(starts, seconds, held, atoms, reductions)

    def chain(self, atoms: Sequence[_Atom], kept: Collection[str], *, is_forward: bool) -> Chain:
        """What is planned: `atoms`, where units in `kept` stay gathered between forward and backward."""
        last = len(self.seconds) - 1
        held, parameters = list(self.held), [atom.parameter for atom in atoms]
        if is_forward:
            parameters = [
                dataclasses.replace(atom.parameter, last=last) if atom.unit in kept else atom.parameter
                for atom in atoms
            ]
        else:
            for atom in self.atoms:
                if atom.unit in kept:
                    for step in range(atom.parameter.last + 1):
                        held[step] += atom.parameter.num_bytes
        return Chain(self.seconds, held, parameters, self.reductions)

    def gathers(self, atoms: Sequence[_Atom], plan: ChainPlan) -> Iterator[Gather]:
        """The plan in the terms of the passes."""
        for bucket in plan.buckets:
            names = tuple(atom.bucket for atom in atoms[bucket.begin : bucket.end])
            yield Gather(names, not bucket.is_packed, self.starts[bucket.start])


def _atoms(graph: torch.fx.Graph, step_of: Mapping[torch.fx.Node, int]) -> Iterator[_Atom]:
    kinds: dict[object, int] = {}
    for node in filter(ops.is_all_gather, graph.nodes):
        (wait,) = node.users
        outs = [user for user in wait.users if ops.is_parameter_out(user)]
        (free,) = [user for user in wait.users if ops.is_call(user, ops.FREE)] or [graph.output_node()]
        value, bucket = node.meta["val"], ops.argument(node, "bucket")
        kind: object = ops.argument(node, "group"), ops.argument(node, "world_size"), value.dtype, value.device
        if ops.is_call(node, ops.ALL_GATHER):  # parts are kept of it, or it is one
            kind = bucket
        number = kinds.setdefault(kind, len(kinds))
        size = num_bytes(value)
        yield _Atom(bucket, Parameter(size, step_of[wait], step_of[free], max(1, len(outs)), number))


@dataclasses.dataclass(frozen=True)
class _Step:
    """What a plan is made from: both directions (one, without gradients), and what gathers cost."""

    forward: _Side
    backward: _Side | None
    channel: Channel

    @classmethod
    def of(cls, graphs: RewrittenGraphs, goal: Goal) -> _Step:
        prediction = predict(graphs, goal.hardware, compiler=goal.compiler)
        rings = rings_of(graphs, goal.hardware)
        sides = []
        for side in (graphs.forward, graphs.backward):
            moments = [moment for moment in prediction.memory.moments if side and moment.side == side.title]
            sides.append(_Side.of(side.graph, moments, rings, goal) if side else None)
        assert sides[0] is not None
        return cls(sides[0], sides[1], _channel(graphs, rings, goal.hardware))

    def kept_first(self) -> list[str]:
        """The units that could be kept, from the one that the backward uses first."""
        atoms = self.backward.atoms if self.backward else ()
        return list(dict.fromkeys(atom.unit for atom in atoms))


def _channel(graphs: RewrittenGraphs, rings: Mapping[str, Ring], hardware: Hardware) -> Channel:
    """What gathers cost, by two messages of the largest ring."""
    gathers = [node for node in graphs.forward.graph.nodes if ops.is_all_gather(node)]
    sizes = [rings[ops.argument(node, "group")] for node in gathers] or [Ring(1, 1)]
    ring = max(sizes, key=lambda ring: ring.size)
    num = 2**30 * ring.size
    start = collectives.all_gather(0, ring, hardware)
    sending = collectives.all_gather(num, ring, hardware) - start
    return Channel(start, 0.0, num / sending if sending else float("inf"), hardware.memory_bandwidth / 2)


# ---------------------------------------------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------------------------------------------


def _best(step: _Step, options: Options, limit: int) -> StepPlan | None:
    """The best plan by the chains; None if none fits."""
    order = [unit for unit in step.kept_first() if unit not in options.fixed]
    always = [unit for unit in step.kept_first() if options.fixed.get(unit) is False]
    tried: dict[int, tuple[float, int, StepPlan]] = {}

    def try_sizes(sizes: Sequence[int]) -> None:
        for size in sizes:
            if size not in tried and (found := _with_kept(step, [*always, *order[:size]], options.forms, limit)):
                tried[size] = found

    gap = max(1, len(order) // _SIZES)
    try_sizes([*range(0, len(order), gap), len(order)])
    if not tried:
        return None
    best = min(tried, key=lambda size: tried[size][:2])
    try_sizes(range(max(0, best - gap + 1), min(len(order), best + gap - 1) + 1))
    fastest = min(seconds for seconds, _, _ in tried.values())
    return min((found for found in tried.values() if found[0] <= _SAME * fastest), key=lambda found: found[1])[2]


def _lean(step: _Step, options: Options) -> StepPlan:
    """The plan that needs least: what is gathered is gathered when it is needed, and reductions are waited for."""
    kept = [unit for unit in step.kept_first() if options.fixed.get(unit) is False]
    sides = [
        [
            Gather((atom.bucket,), not options.forms[0], side.starts[atom.parameter.first])
            for atom in (side.atoms if side else ())
        ]
        for side in (step.forward, step.backward)
    ]
    return StepPlan(tuple(kept), tuple(sides[0]), tuple(sides[1]), 0)


def _with_kept(
    step: _Step, kept: Sequence[str], forms: Sequence[bool], limit: int
) -> tuple[float, int, StepPlan] | None:
    """Seconds, peak and plan where these units are kept; None if no plan fits."""
    gathers: list[tuple[Gather, ...]] = []
    outcomes: list[Outcome] = []
    for side, is_forward in ((step.forward, True), (step.backward, False)):
        if side is None:
            gathers.append(())
            continue
        atoms = [atom for atom in side.atoms if is_forward or atom.unit not in kept]
        chain = side.chain(atoms, kept, is_forward=is_forward)
        if chain.lowest_peak > limit:
            return None
        ends = range(1, len(atoms) + 1)
        plan = best_plan(chain, step.channel, limit=limit, ends=ends, forms=forms, slack=_SLACK)
        outcomes.append(evaluate(chain, plan, step.channel))
        gathers.append(tuple(side.gathers(atoms, plan)))
    seconds, peak = sum(outcome.seconds for outcome in outcomes), max(outcome.peak for outcome in outcomes)
    return seconds, peak, StepPlan(tuple(kept), gathers[0], gathers[1], _UNDER_WAY[0])
