"""Steps: what the graphs of a step compute and gather, as chains, and the best plan of them by these chains.

1. What computes when, what is in memory anyway, what is gathered and reduced is read from graphs that free every unit
   after the forward, as one chain for each direction.
2. Which units stay gathered between forward and backward: those that the forward uses last, as many as pay and
   fit. They are in memory for the shortest time, and their gathers are those that the backward waits for first.
3. For each choice of those, `planning.best_plan` cuts the rest into gathers and says when each starts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch.fx

from ..costs import collectives
from ..costs.collectives import Ring
from ..costs.hardware import Hardware
from ..costs.memory import Moment
from ..costs.nodes import Compiler, num_bytes
from ..costs.predict import predict
from ..costs.timeline import num_messages, rings_of, seconds_of
from ..costs.work import Work, WorkOfGraph
from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..passes import ops
from ..passes.plan import Gather, StepPlan
from ..passes.prefetch_all_gather import first_uses
from .chains import Chain, ChainPlan, Channel, Item, Reduction, evaluate
from .search import best_plan

SAME = 1.001
"""Plans within this factor are as fast as each other; then the one with the lower peak is better."""

_SLACK = 1.5  # gathers are planned for messages that take so many times as long as predicted
_LESS = ("activations", "temporaries", "reductions")  # of what there is less if less is saved, or reductions waited for
_FINE = 0.01  # what is gathered at a time is lowered as long as that is worth this part of it
_SIZES = 12  # numbers of kept units that are tried at first


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A plan, and what it takes by the chains."""

    seconds: float
    plan: StepPlan


@dataclasses.dataclass(frozen=True)
class StepChains:
    """What a plan is made from: both directions (one, without gradients), what gathers cost, and what is open.

    Attributes:
        compute: seconds that any plan takes.
        least: bytes that any plan needs, however little the forward saves, and if each reduction is waited for.
        forms: whether buckets may be packed, and not.
        always_kept: units that stay gathered between forward and backward in any plan.
        open_units: units that may, from the one that the backward uses first.
    """

    forward: _Direction
    backward: _Direction | None
    channel: Channel
    compute: float
    least: int
    forms: Sequence[bool]
    always_kept: Sequence[str]
    open_units: Sequence[str]

    @classmethod
    def of(
        cls,
        graphs: RewrittenGraphs,
        hardware: Hardware,
        compiler: Compiler,
        *,
        forms: Sequence[bool],
        fixed: Mapping[str, bool],
    ) -> StepChains:
        """The step of graphs that free every unit.

        Args:
            fixed: units that are freed (True) or kept (False) in any plan.
        """
        prediction = predict(graphs, hardware, compiler=compiler)
        work, rings = prediction.work, rings_of(prediction.work, hardware)

        def side_of(part: WorkOfGraph) -> _Direction:
            moments = [moment for moment in prediction.memory.moments if moment.side == part.title]
            return _Direction.of(part, moments, rings, hardware)

        backward = side_of(work.backward) if work.backward else None
        units = list(dict.fromkeys(atom.unit for atom in backward.atoms)) if backward else []
        kept = [unit for unit in units if fixed.get(unit) is False]
        needed = [moment.total - sum(map(moment.held.__getitem__, _LESS)) for moment in prediction.memory.moments]
        between = sum(atom.item.num_bytes for atom in backward.atoms if atom.unit in kept) if backward else 0
        return cls(
            side_of(work.forward),
            backward,
            _channel(work, rings, hardware),
            prediction.timeline.compute + prediction.optimizer_seconds,
            max(*needed, between),
            forms,
            kept,
            [unit for unit in units if unit not in fixed],
        )

    @property
    def has_reductions(self) -> bool:
        return self.backward is not None and len(self.backward.reductions) > 0

    @property
    def most(self) -> int:
        """Bytes that no plan needs more than: all that is gathered, twice, for a whole side."""
        sides = [side for side in (self.forward, self.backward) if side is not None]
        return max(max(side.held) + 2 * sum(atom.item.num_bytes for atom in side.atoms) for side in sides)

    def best(self, limit: int) -> Estimate | None:
        """The best plan within the limit of bytes, with as few units kept as it takes; None if none fits."""
        found: dict[int, Estimate] = {}

        def try_sizes(sizes: Iterable[int]) -> None:
            for size in sorted(set(sizes) - set(found)):
                if (estimate := self.with_kept(size, limit)) is not None:
                    found[size] = estimate

        most = len(self.open_units)
        gap = max(1, most // _SIZES)
        try_sizes([*range(0, most, gap), most])
        if not found:
            return None
        fastest = min(found, key=lambda size: found[size].seconds)
        try_sizes(range(max(0, fastest - gap + 1), min(most + 1, fastest + gap)))
        seconds = min(estimate.seconds for estimate in found.values())
        size = min(size for size, estimate in found.items() if estimate.seconds <= SAME * seconds)
        return self.with_kept(size, limit, is_lean=True)

    def with_kept(self, size: int, limit: int, *, is_lean: bool = False) -> Estimate | None:
        """The best plan where so many of the open units are kept; with `is_lean`, in as few bytes as it takes."""
        kept = [*self.always_kept, *self.open_units[:size]]
        gathers: list[tuple[Gather, ...]] = []
        seconds = 0.0
        for side, is_forward in ((self.forward, True), (self.backward, False)):
            if side is None:
                gathers.append(())
                continue
            atoms = [atom for atom in side.atoms if is_forward or atom.unit not in kept]
            chain = side.chain(atoms, kept, is_forward=is_forward)
            search = partial(_search, channel=self.channel, forms=self.forms, limit=limit)
            plan = _leanest(chain, self.channel, search, limit) if is_lean else search(chain)
            if plan is None:
                return None
            seconds += evaluate(chain, plan, self.channel).seconds
            gathers.append(tuple(side.gathers(atoms, plan)))
        return Estimate(seconds, StepPlan(tuple(kept), gathers[0], gathers[1], 1))

    def leanest(self) -> StepPlan:
        """The plan that needs least: what is gathered is gathered when it is needed, and reductions are waited for."""
        is_grouped = not self.forms[0]
        sides = []
        for side in (self.forward, self.backward):
            atoms = side.atoms if side else ()
            starts = side.starts if side else ()
            sides.append(tuple(Gather((atom.bucket,), is_grouped, starts[atom.item.first]) for atom in atoms))
        return StepPlan(tuple(self.always_kept), sides[0], sides[1], 0)


@dataclasses.dataclass(frozen=True)
class _Atom:
    """A bucket that is gathered; what is planned as one."""

    bucket: str
    item: Item

    @property
    def unit(self) -> str:
        return ops.unit_of_bucket(self.bucket)


@dataclasses.dataclass(frozen=True)
class _Direction:
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
    def of(
        cls, work: WorkOfGraph, moments: Sequence[Moment], rings: Mapping[str, Ring], hardware: Hardware
    ) -> _Direction:
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
                seconds[step_of[kernel.nodes[-1]]] += kernel.seconds(hardware)
        for moment in moments:
            step = step_of[moment.node]
            held[step] = max(held[step], moment.total - moment.held["gathered"])
        atoms = sorted(_atoms(graph, step_of), key=lambda atom: atom.item.first)
        if twice := [bucket for bucket, count in Counter(atom.bucket for atom in atoms).items() if count > 1]:
            raise ConfigError(
                f"hardware and memory_budget plan units by name, and two have the bucket {twice[0]}: shard the module "
                "that holds both, without sharding them before"
            )
        groups = {ops.argument(node, "group") for node in graph.nodes if ops.is_all_gather(node)}
        reductions = [
            Reduction(seconds_of(node, rings[ops.argument(node, "group")], hardware), step_of[node])
            for node in graph.nodes
            if ops.is_reduction(node) and ops.argument(node, "group") in groups
        ]
        return cls(starts, seconds, held, atoms, reductions)

    def chain(self, atoms: Sequence[_Atom], kept: Collection[str], *, is_forward: bool) -> Chain:
        """What is planned: `atoms`, where units in `kept` stay gathered between forward and backward."""
        last = len(self.seconds) - 1
        held, items = list(self.held), [atom.item for atom in atoms]
        if is_forward:
            items = [dataclasses.replace(atom.item, last=last) if atom.unit in kept else atom.item for atom in atoms]
        else:
            for atom in self.atoms:
                if atom.unit in kept:
                    for step in range(atom.item.last + 1):
                        held[step] += atom.item.num_bytes
        return Chain(self.seconds, held, items, self.reductions)

    def gathers(self, atoms: Sequence[_Atom], plan: ChainPlan) -> Iterator[Gather]:
        """The plan in the terms of the passes."""
        for gather in plan.gathers:
            names = tuple(atom.bucket for atom in atoms[gather.begin : gather.end])
            yield Gather(names, not gather.is_packed, self.starts[gather.start])


def _atoms(graph: torch.fx.Graph, step_of: Mapping[torch.fx.Node, int]) -> Iterator[_Atom]:
    kinds: dict[object, int] = {}
    for node in filter(ops.is_all_gather, graph.nodes):
        wait = ops.wait_of(node)
        (free,) = [user for user in wait.users if ops.is_call(user, ops.FREE)] or [graph.output_node()]
        value, bucket = node.meta["val"], ops.argument(node, "bucket")
        kind: object = ops.argument(node, "group"), ops.argument(node, "world_size"), value.dtype, value.device
        if ops.is_call(node, ops.ALL_GATHER):  # parts are kept of it, or it is one
            kind = bucket
        number = kinds.setdefault(kind, len(kinds))
        copied = max(step_of[out] for out in ops.parameters_of(node))
        yield _Atom(bucket, Item(num_bytes(value), step_of[wait], step_of[free], num_messages(node), number, copied))


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


def _search(chain: Chain, channel: Channel, forms: Sequence[bool], limit: int) -> ChainPlan | None:
    try:
        return best_plan(chain, channel, limit=limit, ends=range(1, len(chain.items) + 1), forms=forms)
    except ConfigError:
        return None


def _leanest(
    chain: Chain, channel: Channel, search: Callable[[Chain], ChainPlan | None], limit: int
) -> ChainPlan | None:
    """Of the plans as fast as the fastest, one that gathers little at a time, even where there is room for more."""
    plan = search(chain)
    if plan is None:
        return None
    fast = SAME * evaluate(chain, plan, channel).seconds
    bare = dataclasses.replace(chain, held=[0] * len(chain.held))
    low, high = bare.lowest_peak, evaluate(bare, plan, channel).peak
    while high - low > max(1, _FINE * high):  # between neighbours there is no middle
        middle = (low + high) // 2
        tight = dataclasses.replace(chain, held=[max(held, limit - middle) for held in chain.held])
        other = search(tight)
        if other is not None and evaluate(chain, other, channel).seconds <= fast:
            plan, high = other, middle
        else:
            low = middle
    return plan
