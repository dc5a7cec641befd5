"""Sharding: what a sharded model knows besides its parameters."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..compiler.options import CompileConfig
from ..compiler.splits import activations_are_free
from ..compiler.statements import statement_of_graphs
from ..graphs import RewrittenGraphs
from ..passes import metadata, ops
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..planning.options import ScheduleConfig
from ..planning.step_plans import Goal, Leeway, Planner
from ..runtime import gathered_once
from ..runtime.agreement import any_has_raised
from ..runtime.comparison import Statement
from ..runtime.compilations import Compilations
from ..runtime.flat_shard import FlatShard, Shards
from ..runtime.gradients import reduce_leftovers, watch_whole
from ..runtime.groups import is_nccl, num_shards_of
from ..runtime.registrations import registrations
from .newcomers import Owner, newcomers, refuse
from .own_units import OwnUnits
from .reading import Running


class Compiler(Protocol):
    """Compiles a model as another one was compiled."""

    @property
    def config(self) -> CompileConfig: ...

    def __call__(self, model: nn.Module) -> None: ...


class Looked(weakref.WeakKeyDictionary[nn.Module, int]):
    """What was seen of modules in this process; in a file it is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Made(list[Callable[[], RewrittenGraphs]]):
    """What reads the graphs that were compiled in this process; a copy, or what is in a file, is empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@dataclasses.dataclass(eq=False, kw_only=True)
class Sharding(Shards):
    """What a sharded model knows besides: its schedule options, the graphs compiled so far.

    Attributes:
        is_alone: whether it was to be on one rank among several: its parameters are that rank's own.
        together: the modules that were sharded as one unit, by a list; empty for a model.
        parts: for every number of ranks that a unit is resharded over after the forward, this rank's place among them.
        keeps_gradients: whether the next forwards' gradients are kept, to be reduced later.
        made: what reads the graphs compiled so far, one for each.
        plans, undecided: what was planned, by program; see `step_plans.Planner`.
        compilations: graph breaks and recompilations, if it was compiled by `fsdp_compile`.
        compile: how the model was compiled, if it was.
        reason: why its strategy was chosen; None if the user said which.
        left: places of parameters that were left as they are.
        looked: how much was registered on modules when one was last called, and looked through for new parameters.
        is_summoned: whether full parameters are in the place of the sharded ones for now.
        owns: the units by the call that has sharded them: of this model, and of parts that were sharded before.
        schedules: those that the model had, once it has had several.
        post_optim_event: what the next forward is to wait for.
        owners_of_whole: with a single rank, the module that holds each parameter, and its name there.
        records_cuda_graphs: whether a graph of it was compiled to be recorded.
        lasting: while a forward runs, the shards that are gathered once for it and others.
    """

    units: list[str]
    schedule: ScheduleConfig
    is_alone: bool = False
    together: tuple[nn.Module, ...] = ()
    parts: dict[int, metadata.Part] = dataclasses.field(default_factory=dict)
    running: Running = dataclasses.field(default_factory=Running)
    keeps_gradients: bool = False
    made: Made = dataclasses.field(default_factory=lambda: Made())
    plans: dict[str, StepPlan | None] = dataclasses.field(default_factory=dict)
    undecided: dict[str, Statement] = dataclasses.field(default_factory=dict)
    compilations: Compilations = dataclasses.field(default_factory=Compilations)
    compile: Compiler | None = None
    reason: str | None = None
    left: set[Owner] = dataclasses.field(default_factory=set)
    looked: Looked = dataclasses.field(default_factory=lambda: Looked())
    is_summoned: bool = False
    owns: list[OwnUnits] = dataclasses.field(default_factory=list)
    schedules: list[ScheduleConfig] = dataclasses.field(default_factory=list)
    post_optim_event: Any = None
    owners_of_whole: dict[str, tuple[nn.Module, str]] = dataclasses.field(default_factory=dict)
    records_cuda_graphs: bool = False
    lasting: set[FlatShard] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.running.prepare, self.running.finish = self.prepare, self.finish
        registrations()

    @property
    def graphs(self) -> list[RewrittenGraphs]:
        """Those compiled so far; what an earlier start has compiled is read when one looks at it."""
        return [read() for read in self.made]

    def pipeline(self, compiler: CompileConfig) -> Callable[[StepPlan | None], Pipeline]:
        """The passes that this model's graphs run through, for a plan or None. It does not keep the model alive."""
        schedule = self._schedule_for(compiler)
        return partial(pipeline_of, schedule, self.units, num_shards_of(self.mesh), self.parts, self._is_grouped)

    def planner(self, compiler: CompileConfig) -> Planner | None:
        """What plans this model's graphs; None if their schedule follows from the options. As `pipeline` otherwise."""
        if (hardware := self.schedule.hardware) is None:
            return None
        schedule = self._schedule_for(compiler)
        leeway = leeway_of(schedule, self.units, num_shards_of(self.mesh), self.parts, self._is_grouped)
        goal = Goal(
            hardware,
            self.schedule.memory_budget,
            compiler.backend,  # type: ignore[arg-type]
            is_within_plain=self.schedule.is_at_hand,
        )

        agreement = self.agreement

        def decide(statement: Statement, make: Callable[[], str]) -> str:
            return make() if agreement is None else agreement.decided_by_first(statement, make)

        return Planner(leeway, goal, self.plans, statement_of_graphs, decide, self.undecided, keeps=True)

    def _schedule_for(self, compiler: CompileConfig) -> ScheduleConfig:
        """As the options say; an optimizer cannot step within a CUDA graph, but behind it."""
        return self.schedule.without_updates() if compiler.records_cuda_graphs else self.schedule

    def tell(self, error: Exception) -> None:
        """Tell the other ranks what a call raised on this one; RuntimeError if they cannot be told."""
        if (agreement := self.agreement) is not None:
            agreement.tell(error)

    def come_back(self) -> None:
        """Before a call: one that raised is over, and compiling anew may take longer than others would wait."""
        if any_has_raised() and (agreement := self.agreement) is not None:
            agreement.come_back()

    @property
    def _is_grouped(self) -> bool:
        lowering = self.schedule.collective_lowering
        is_auto_grouped = lowering == "auto" and self.mesh is not None and is_nccl(self.mesh)
        return lowering == "grouped" or is_auto_grouped

    def refuse_if_summoned(self, what: str) -> None:
        """Raise RuntimeError inside summon_full_params, where `what` has no meaning."""
        if self.is_summoned:
            raise RuntimeError(f"{what} was called inside summon_full_params: leave its block first")

    def refuse_newcomers(self, module: nn.Module) -> None:
        """Raise ConfigError for trainable parameters at or below `module` that came after it was sharded."""
        if self.mesh is not None and self.mesh.size() > 1:
            refuse(newcomers(module, self.left), f"the {type(module).__name__}")
        self.looked[module] = registrations().count

    def change_schedule(self, schedule: ScheduleConfig) -> None:
        """The next call compiles by another schedule, or goes on with what it has compiled by that before."""
        self.schedules = self.schedules or [self.schedule]
        if schedule not in self.schedules:
            self.schedules.append(schedule)
        self.schedule = schedule
        self.plans.clear()
        self.undecided.clear()
        index = self.schedules.index(schedule)
        for shard in self.shards:
            number, *_ = shard.key.split(" ")
            shard.key = f"{number} by schedule {index}" if index else number

    def meshes(self) -> set[DeviceMesh]:
        """All that parameters are sharded over, or distributed over besides."""
        whole = [parameter for _, parameter in self.whole.values()]
        sharded = [parameter for shard in self.shards for parameter in shard.parameters]
        found = {each.device_mesh for each in (*whole, *sharded) if isinstance(each, DTensor)}
        found |= {shard.mesh for shard in self.shards}
        slots = [slot for shard in self.shards for slot in shard.layout.slots]
        found |= {each.mesh for slot in slots for each in (slot.distribution, slot.read_as) if each is not None}
        return found if self.mesh is None else {self.mesh, *found}

    def reshard(self) -> None:
        """Sharded parameters are in their places again, where `unshard` has put full ones."""
        for own in self.owns:
            own.reshard()

    def check(self) -> None:
        """Between steps: parameters that were moved are views of their shards again."""
        for shard in self.shards:
            shard.check_views()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self, module: nn.Module) -> None:
        """Before a forward of `module`: parameters are views of their shards, and gradients will have a place to go."""
        self.refuse_if_summoned("the model")
        for own in self.owns:
            own.prepare()
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        # Without graphs each time: eager code takes most of a step. With them, when something was registered anywhere.
        if torch.is_grad_enabled() and not (self.made and self.looked.get(module) == registrations().count):
            self.refuse_newcomers(module)
        self.is_step_over = self.is_finishing = self.is_checking = False
        if self.updates is not None:
            self.updates.is_due, self.updates.is_kept = False, self.keeps_gradients
        self.check()
        self._renew_whole()
        watch_whole(self)
        for shard in self.shards:
            shard.prepare(keeps_gradients=self.keeps_gradients)
        is_frozen = not any(shard.data.requires_grad for shard in self.shards)
        if is_frozen and torch.is_grad_enabled() and not self.keeps_gradients:
            reduce_leftovers(self)  # no gradient of this step will be a reason to
        if torch.is_grad_enabled():
            self.lasting = set(self._lasting())
            gathered_once.lend(self.shards, self.lasting)

    def finish(self) -> None:
        """After a forward: what was lent to it is taken back, so that the backward ends its life."""
        for shard in self.shards:
            shard.let_go_of_kept()
        lasting, self.lasting = self.lasting, set()
        gathered_once.take_back(self.shards, lasting)

    def _lasting(self) -> list[FlatShard]:
        """The shards that are gathered once for this call and others."""
        wanted = [shard for shard in self.shards if shard.stays_full.is_for_call() or self.keeps_gradients]
        return self.that_can_last(wanted) if wanted else []

    def that_can_last(self, shards: Iterable[FlatShard]) -> list[FlatShard]:
        """Those of these shards of which full parameters may stay full from call to call."""
        reshard = self.schedule.reshard_of_unit(self.units, num_shards_of(self.mesh))

        def may(shard: FlatShard) -> bool:
            unit, layout = ops.unit_of_bucket(shard.layout.bucket), shard.layout
            is_resharded = reshard.get(unit, not shard.stays_full.is_for_call())
            return not is_resharded and layout.shards.size > 1 and not layout.sent_forms[0]

        return [] if self.records_cuda_graphs else list(filter(may, shards))

    def _renew_whole(self) -> None:
        """What has taken the place of a parameter, as a loader puts it there, is divided, checked and updated as that.

        load_state_dict(assign=True) does so, and from_pretrained, which shards a model before it has values.
        """
        for name, (module, attribute) in self.owners_of_whole.items():
            (unit, before), now = self.whole[name], module._parameters.get(attribute)
            if now is None or now is before:
                continue
            self.whole[name] = unit, now
            if before in self.divisors:
                self.divisors[now] = self.divisors.pop(before)
            if hasattr(before, "fsdp_sharding"):
                now.fsdp_sharding = Membership(self)  # type: ignore[attr-defined]


def pipeline_of(
    schedule: ScheduleConfig,
    units: list[str],
    num_shards: int,
    parts: Mapping[int, metadata.Part],
    grouped: bool,
    plan: StepPlan | None = None,
) -> Pipeline:
    reshard = schedule.reshard_of_unit(units, num_shards)
    if plan is not None and plan.kept is not None:
        reshard = dict.fromkeys(units, True) | reshard | dict.fromkeys(plan.kept, False)
    return Pipeline.of(
        reshard={unit: value if isinstance(value, bool) else parts[value] for unit, value in reshard.items()},
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=schedule.backward_prefetch,
        forward_lists=schedule.forward_lists,
        backward_lists=schedule.backward_lists,
        reductions=schedule.reductions,
        grouped=grouped,
        plan=plan,
        passes=schedule.passes,
        poison=schedule.poison,
        pin_memory=schedule.pin_memory,
        updates=schedule.updates,
        pieces=schedule.pieces or (plan.pieces if plan else 1),
    )


def leeway_of(
    schedule: ScheduleConfig, units: list[str], num_shards: int, parts: Mapping[int, metadata.Part], grouped: bool
) -> Leeway:
    """What a planner may choose from."""

    def decompose(pieces: int) -> Leeway:
        return leeway_of(dataclasses.replace(schedule, pieces=pieces), units, num_shards, parts, grouped)

    fixed = schedule.reshard_of_unit(units, num_shards)
    freed = dict.fromkeys(units, True) | {unit: value for unit, value in fixed.items() if value}
    base = dataclasses.replace(schedule, reshard_after_forward=freed, forward_prefetch=0, backward_prefetch=0)
    forms = {"packed": (True,), "grouped": (False,)}.get(schedule.collective_lowering, (False, True))
    return Leeway(
        lambda plan: pipeline_of(schedule, units, num_shards, parts, grouped, plan),
        pipeline_of(base, units, num_shards, parts, True, StepPlan((), (), (), 1)),
        forms,
        {unit: bool(value) for unit, value in fixed.items()},
        activations_are_free(),
        decompose if schedule.pieces is None else None,
    )


def sharding_of(model: nn.Module) -> Sharding:
    found: Sharding = vars(model)["_fsdp_sharding"]
    return found


def sharding_around(module: nn.Module) -> Sharding | None:
    """The sharding of a model, or of the one that `module` is a part of; None if nothing of it is sharded."""
    if is_sharded(module):
        return sharding_of(module)
    for part in module.modules():
        running: Running | None = vars(part).get("_fsdp_running")
        if running is not None and running.prepare is not None:
            return running.prepare.__self__  # type: ignore[attr-defined,no-any-return]  # see __post_init__
    return None


def is_sharded(module: nn.Module) -> bool:
    return "_fsdp_sharding" in vars(module)


@dataclasses.dataclass(frozen=True)
class Membership:
    """On a parameter: of which sharding it is. A copy of the parameter, or one from a file, is of none."""

    sharding: Sharding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def note_sharding(model: nn.Module, sharding: Sharding) -> None:
    """Tell the tensors that graphs take which sharding they belong to: shards, and parameters of a single rank."""
    for shard in sharding.shards:
        shard.sharding = sharding
    own = [parameter for _, parameter in sharding.whole.values()]
    for parameter in own if sharding.mesh is not None else model.parameters():
        parameter.fsdp_sharding = Membership(sharding)  # type: ignore[attr-defined]
