"""Scheduling: the plan of a step, by what the cost model says of it, within a limit of bytes.

1. The graphs are rewritten once with every unit freed after the forward: what computes when, what is in memory
   anyway, what is gathered and reduced is read from them, as one chain for each direction.
2. Which units stay gathered between forward and backward: those that the forward uses last, as many as pay and
   fit. They are in memory for the shortest time, and their gathers are those that the backward waits for first.
3. For each choice of those, `planning.best_plan` cuts the rest into gathers and says when each starts.
4. The best one, and one that keeps all units, are rewritten and predicted in full, and so is what the user asked for
   without a plan. The fastest that fits is taken.
5. Where memory is what limits it, all of this is done again for programs that save less and compute more.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch.fx

from .chains import Chain, Channel, Parameter, Reduction, evaluate
from .chains import Plan as ChainPlan
from .costs import collectives
from .costs.collectives import Ring
from .costs.hardware import Hardware
from .costs.memory import CATEGORIES, Moment
from .costs.nodes import Compiler, num_bytes
from .costs.predict import Prediction, bytes_text, predict, rings_of
from .costs.timeline import seconds_of
from .costs.work import Work, WorkOfGraph
from .errors import ConfigError
from .graphs import Draft, RewrittenGraphs
from .passes import ops
from .passes.pipeline import Pipeline
from .passes.plan import Gather, StepPlan
from .passes.prefetch_all_gather import first_uses
from .planning import best_plan

MARGIN = 0.05
"""The part of a memory budget that plans leave: predictions of the peak are within so much of what is measured."""

_SLACK = 1.5  # gathers are planned for messages that take so many times as long as predicted
_SAME = 1.001  # plans within this factor are as fast as each other; then the one with the lower peak is better
_UNDER_WAY = (1, 2, 4)  # numbers of reductions at once that are tried
_FINE = 0.01  # what is gathered at a time is lowered as long as that is worth this part of it
_SIZES = 12  # numbers of kept units that are tried at first
_ACTIVATIONS = (0.75, 0.5, 0.25)  # activation memory budgets that are tried where memory is short


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
        activations: whether what is saved is open, or torch's activation memory budget has been set.
    """

    pipeline: Callable[[StepPlan | None], Pipeline]
    base: Pipeline
    forms: Sequence[bool]
    fixed: Mapping[str, bool]
    activations: bool = True


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
    step = _Step.of(draft(options.base, None), goal)
    candidates = [_found(None, draft, options, goal), *_planned(step, None, draft, options, goal)]
    if options.activations and _is_short(step, candidates, options, goal):
        for activations in _ACTIVATIONS:
            step = _Step.of(draft(options.base, activations), goal)
            seconds = [found.prediction.seconds for found in candidates if found.peak <= goal.limit]
            if step.compute >= min(seconds, default=math.inf):
                break  # what is computed again costs more than memory would gain; with fewer activations, even more
            candidates += _planned(step, activations, draft, options, goal)
    fitting = [found for found in candidates if found.peak <= goal.limit]
    if fitting:
        fastest = min(found.prediction.seconds for found in fitting)
        return min((found for found in fitting if found.prediction.seconds <= _SAME * fastest), key=lambda f: f.peak)
    least = min(candidates, key=lambda found: found.peak)
    if goal.memory_budget is not None:
        raise ConfigError(_what_is_missing(least, goal))
    return least


def _planned(step: _Step, activations: float | None, draft: Draft, options: Options, goal: Goal) -> list[Found]:
    """Plans for these activations: one that fits if there is any, the same with more reductions under way."""
    found: list[Found] = []
    limit = goal.limit
    while limit > 0 and len(found) < 3 and (best := _best(step, options, limit)):
        plan = dataclasses.replace(best.plan, activations=activations)
        found.append(_found(plan, draft, options, goal))
        excess = found[-1].peak - goal.limit
        if excess <= 0:
            for number in _UNDER_WAY[1:] if step.backward and step.backward.reductions else ():
                found.append(_found(dataclasses.replace(plan, reductions=number), draft, options, goal))
                if found[-1].prediction.seconds * _SAME >= found[-2].prediction.seconds:
                    break
            all_kept = [*_always_kept(step, options), *_open_units(step, options)]
            if len(plan.kept) < len(all_kept) and (other := _with_kept(step, all_kept, options.forms, limit)):
                found.append(_found(dataclasses.replace(other.plan, activations=activations), draft, options, goal))
            return found
        limit -= excess  # the chains do not see all that is in memory
    return [*found, _found(_lean(step, options, activations), draft, options, goal)]


def _is_short(step: _Step, candidates: Sequence[Found], options: Options, goal: Goal) -> bool:
    """Whether there would be a faster plan with more memory."""
    if not any(found.peak <= goal.limit for found in candidates):
        return True
    limited, unlimited = _best(step, options, goal.limit), _best(step, options, sys.maxsize)
    return limited is None or (unlimited is not None and limited.seconds > _SAME * unlimited.seconds)


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
            made = self.agree(program, lambda: self._made(draft))
            self.plans[program] = StepPlan.from_json(made) if made else None
        plan = self.plans[program]
        if self.goal.memory_budget is not None:
            found = _found(plan, draft, self.options, self.goal)
            if found.peak > self.goal.limit:
                raise ConfigError(_what_is_missing(found, self.goal))
        return plan

    def _made(self, draft: Draft) -> str:
        plan = find_plan(draft, self.options, self.goal).plan
        return plan.to_json() if plan else ""


def _found(plan: StepPlan | None, draft: Draft, options: Options, goal: Goal) -> Found:
    graphs = draft(options.pipeline(plan), plan.activations if plan else None)
    return Found(plan, predict(graphs, goal.hardware, compiler=goal.compiler))


def _what_is_missing(found: Found, goal: Goal) -> str:
    peak = found.prediction.memory.peak
    held = sorted(((peak.held[name], name) for name in CATEGORIES if peak.held[name]), reverse=True)
    listed = ", ".join(f"{name} {bytes_text(size)}" for size, name in held)
    helping = [_HELPS[name] for _, name in held if name in _HELPS]
    budget, missing, least, most = map(
        bytes_text, (goal.memory_budget or 0, found.peak - goal.limit, found.peak, goal.limit)
    )
    return (
        f"memory_budget of {budget}: {missing} are missing. The plan that needs least takes {least} at its peak, in "
        f"the {peak.side} ({listed}), of {most} that may be planned: {MARGIN:.0%} are left for what predictions miss. "
        f"What would help: {'; '.join(helping[:2])}"
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
    def of(cls, work: WorkOfGraph, moments: Sequence[Moment], rings: Mapping[str, Ring], goal: Goal) -> _Side:
        graph = work.graph
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
        for kernel in work.kernels:
            if not all(map(ops.is_dialect, kernel.nodes)) or ops.is_call(kernel.nodes[0], ops.PACK):
                seconds[step_of[kernel.nodes[-1]]] += kernel.seconds(goal.hardware)
        for moment in moments:
            step = step_of[moment.node]
            held[step] = max(held[step], moment.total - moment.held["gathered"])
        atoms = sorted(_atoms(graph, step_of), key=lambda atom: atom.parameter.first)
        if twice := [bucket for bucket, count in Counter(atom.bucket for atom in atoms).items() if count > 1]:
            raise ConfigError(
                f"hardware and memory_budget plan units by name, and two have the bucket {twice[0]}: shard the module "
                "that holds both, without sharding them before"
            )
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
    """What a plan is made from: both directions (one, without gradients), and what gathers cost.

    `compute` is the seconds that any plan takes.
    """

    forward: _Side
    backward: _Side | None
    channel: Channel
    compute: float

    @classmethod
    def of(cls, graphs: RewrittenGraphs, goal: Goal) -> _Step:
        prediction = predict(graphs, goal.hardware, compiler=goal.compiler)
        work, rings = prediction.work, rings_of(prediction.work, goal.hardware)
        sides = []
        for side in (work.forward, work.backward):
            moments = [moment for moment in prediction.memory.moments if side and moment.side == side.title]
            sides.append(_Side.of(side, moments, rings, goal) if side else None)
        assert sides[0] is not None
        compute = prediction.timeline.compute + prediction.optimizer_seconds
        return cls(sides[0], sides[1], _channel(work, rings, goal.hardware), compute)

    def kept_first(self) -> list[str]:
        """The units that could be kept, from the one that the backward uses first."""
        atoms = self.backward.atoms if self.backward else ()
        return list(dict.fromkeys(atom.unit for atom in atoms))


def _channel(work: Work, rings: Mapping[str, Ring], hardware: Hardware) -> Channel:
    """What gathers cost, by two messages of the largest ring."""
    gathers = [node for node in work.forward.graph.nodes if ops.is_all_gather(node)]
    sizes = [rings[ops.argument(node, "group")] for node in gathers] or [Ring(1, 1)]
    ring = max(sizes, key=lambda ring: ring.size)
    num = 2**30 * ring.size
    start = _SLACK * collectives.all_gather(0, ring, hardware)
    sending = _SLACK * collectives.all_gather(num, ring, hardware) - start
    return Channel(
        start, _SLACK * hardware.message_start, num / sending if sending else math.inf, hardware.memory_bandwidth / 2
    )


# ---------------------------------------------------------------------------------------------------------------
# The search
# ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """A plan, and what it takes by the chains."""

    seconds: float
    plan: StepPlan


def _best(step: _Step, options: Options, limit: int) -> _Estimate | None:
    """The best plan by the chains, with as few units kept as it takes; None if none fits."""
    order, always = _open_units(step, options), _always_kept(step, options)
    found: dict[int, _Estimate] = {}

    def try_sizes(sizes: Iterable[int]) -> None:
        for size in sorted(set(sizes) - set(found)):
            if (estimate := _with_kept(step, [*always, *order[:size]], options.forms, limit)) is not None:
                found[size] = estimate

    gap = max(1, len(order) // _SIZES)
    try_sizes([*range(0, len(order), gap), len(order)])
    if not found:
        return None
    fastest = min(found, key=lambda size: found[size].seconds)
    try_sizes(range(max(0, fastest - gap + 1), min(len(order) + 1, fastest + gap)))
    seconds = min(estimate.seconds for estimate in found.values())
    size = min(size for size, estimate in found.items() if estimate.seconds <= _SAME * seconds)
    return _with_kept(step, [*always, *order[:size]], options.forms, limit, is_lean=True)


def _open_units(step: _Step, options: Options) -> list[str]:
    return [unit for unit in step.kept_first() if unit not in options.fixed]


def _always_kept(step: _Step, options: Options) -> list[str]:
    return [unit for unit in step.kept_first() if options.fixed.get(unit) is False]


def _lean(step: _Step, options: Options, activations: float | None) -> StepPlan:
    """The plan that needs least: what is gathered is gathered when it is needed, and reductions are waited for."""
    is_grouped = not options.forms[0]
    sides = []
    for side in (step.forward, step.backward):
        atoms = side.atoms if side else ()
        starts = side.starts if side else ()
        sides.append(tuple(Gather((atom.bucket,), is_grouped, starts[atom.parameter.first]) for atom in atoms))
    return StepPlan(tuple(_always_kept(step, options)), sides[0], sides[1], 0, activations)


def _with_kept(
    step: _Step, kept: Sequence[str], forms: Sequence[bool], limit: int, *, is_lean: bool = False
) -> _Estimate | None:
    """The best plan where these units are kept, if one fits; with `is_lean`, in as few bytes as it takes."""
    gathers: list[tuple[Gather, ...]] = []
    seconds = 0.0
    for side, is_forward in ((step.forward, True), (step.backward, False)):
        if side is None:
            gathers.append(())
            continue
        atoms = [atom for atom in side.atoms if is_forward or atom.unit not in kept]
        chain = side.chain(atoms, kept, is_forward=is_forward)
        search = partial(_search, channel=step.channel, forms=forms, limit=limit)
        plan = _leanest(chain, step.channel, search, limit) if is_lean else search(chain)
        if plan is None:
            return None
        seconds += evaluate(chain, plan, step.channel).seconds
        gathers.append(tuple(side.gathers(atoms, plan)))
    return _Estimate(seconds, StepPlan(tuple(kept), gathers[0], gathers[1], _UNDER_WAY[0]))


def _search(chain: Chain, channel: Channel, forms: Sequence[bool], limit: int) -> ChainPlan | None:
    try:
        return best_plan(chain, channel, limit=limit, ends=range(1, len(chain.parameters) + 1), forms=forms)
    except ConfigError:
        return None


def _leanest(
    chain: Chain, channel: Channel, search: Callable[[Chain], ChainPlan | None], limit: int
) -> ChainPlan | None:
    """Of the plans as fast as the fastest, one that gathers little at a time, even where there is room for more."""
    plan = search(chain)
    if plan is None:
        return None
    fast = _SAME * evaluate(chain, plan, channel).seconds
    bare = dataclasses.replace(chain, held=[0] * len(chain.held))
    low, high = bare.lowest_peak, evaluate(bare, plan, channel).peak
    while high - low > _FINE * high:
        middle = (low + high) // 2
        tight = dataclasses.replace(chain, held=[max(held, limit - middle) for held in chain.held])
        other = search(tight)
        if other is not None and evaluate(chain, other, channel).seconds <= fast:
            plan, high = other, middle
        else:
            low = middle
    return plan
