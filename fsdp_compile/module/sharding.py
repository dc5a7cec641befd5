"""Sharding: what a sharded model knows besides its parameters."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn as nn

from ..compiler.capture import activations_are_free
from ..compiler.options import CompileConfig
from ..compiler.statements import statement_of_program
from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..passes import metadata, ops
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..planning.options import ScheduleConfig
from ..planning.step_plans import Goal, Leeway, Planner
from ..runtime.compilations import Compilations
from ..runtime.flat_shard import FlatShard, Shards
from ..runtime.gradients import reduce_leftovers, watch_whole
from ..runtime.groups import is_nccl, num_shards_of
from ..runtime.registrations import registrations
from .newcomers import Owner, newcomers, refuse
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


@dataclasses.dataclass(eq=False, kw_only=True)
class Sharding(Shards):
    """What a sharded model knows besides: its schedule options, the graphs compiled so far.

    Attributes:
        together: the modules that were sharded as one unit, by a list; empty for a model.
        parts: for every number of ranks that a unit is resharded over after the forward, this rank's place among them.
        plans: what was planned, by program; see `step_plans.Planner`.
        has_raised: whether the last call has.
        compilations: graph breaks and recompilations, if it was compiled by `fsdp_compile`.
        compile: how the model was compiled, if it was.
        reason: why its strategy was chosen; None if the user said which.
        left: places of parameters that were left as they are.
        looked: how much was registered on modules when one was last called, and looked through for new parameters.
        is_summoned: whether full parameters are in the place of the sharded ones for now.
        post_optim_event: what the gathers of the next call wait for besides, once.
    """

    units: list[str]
    schedule: ScheduleConfig
    together: tuple[nn.Module, ...] = ()
    parts: dict[int, metadata.Part] = dataclasses.field(default_factory=dict)
    running: Running = dataclasses.field(default_factory=Running)
    graphs: list[RewrittenGraphs] = dataclasses.field(default_factory=list)
    plans: dict[str, StepPlan | None] = dataclasses.field(default_factory=dict)
    has_raised: bool = False
    compilations: Compilations = dataclasses.field(default_factory=Compilations)
    compile: Compiler | None = None
    reason: str | None = None
    left: set[Owner] = dataclasses.field(default_factory=set)
    looked: Looked = dataclasses.field(default_factory=lambda: Looked())
    is_summoned: bool = False
    post_optim_event: torch.Event | None = None

    def __post_init__(self) -> None:
        self.running.prepare = self.prepare
        registrations()

    def pipeline(self) -> Callable[[StepPlan | None], Pipeline]:
        """The passes that this model's graphs run through, for a plan or None. It does not keep the model alive."""
        return partial(pipeline_of, self.schedule, self.units, num_shards_of(self.mesh), self.parts, self._is_grouped)

    def planner(self, compiler: CompileConfig) -> Planner | None:
        """What plans this model's graphs; None if their schedule follows from the options. As `pipeline` otherwise."""
        if self.schedule.hardware is None:
            return None
        leeway = leeway_of(self.schedule, self.units, num_shards_of(self.mesh), self.parts, self._is_grouped)
        goal = Goal(self.schedule.hardware, self.schedule.memory_budget, compiler.backend)  # type: ignore[arg-type]

        agreement = self.agreement

        def decide(program: str, make: Callable[[], str]) -> str:
            if agreement is None:
                return make()
            return agreement.decided_by_first(statement_of_program(program), make)

        return Planner(leeway, goal, self.plans, decide)

    def tell(self, error: Exception) -> None:
        """Tell the other ranks what a call raised on this one; RuntimeError if they cannot be told."""
        if (agreement := self.agreement) is not None:
            self.has_raised = True
            agreement.tell(error)

    def come_back(self) -> None:
        """Before a call: one that raised is over, and compiling anew may take longer than others would wait."""
        if self.has_raised:
            self.has_raised = False
            if (agreement := self.agreement) is not None:
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

    @contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Forwards inside keep the gradients of their backwards."""
        before = [(shard, shard.keeps_gradients) for shard in self.shards]
        for shard in self.shards:
            shard.keeps_gradients = True
        try:
            yield
        finally:
            for shard, keeps in before:
                shard.keeps_gradients = keeps

    def reshard_by(self, shards: Collection[FlatShard], reshards: bool) -> None:
        """From the next call on, units of these shards are resharded after the forward, or not."""
        before = self.schedule.reshard_of_unit(self.units, num_shards_of(self.mesh))
        self._reschedule(
            shards, reshard_after_forward=before | dict.fromkeys(units_of(shards := list(shards)), reshards)
        )

    def gather_ahead(self, side: str, shards: Collection[FlatShard], ahead: Iterable[FlatShard]) -> None:
        """From the next call on, units of `ahead` are gathered where those of `shards` are used first.

        Args:
            side: "forward" or "backward".

        Raises:
            ConfigError: the schedule is planned.
        """
        if self.schedule.hardware is not None:
            raise ConfigError(f"the schedule is planned (hardware=), and says when the {side} gathers: leave one out")
        field = f"{side}_ahead"
        changed = dict(getattr(self.schedule, field)) | dict.fromkeys(units_of(shards), tuple(units_of(ahead)))
        self._reschedule(shards, **{field: tuple((unit, named) for unit, named in changed.items() if named)})

    def _reschedule(self, shards: Collection[FlatShard], **changes: Any) -> None:
        """Change the schedule of the units of these shards.

        Their keys change, and with them what Dynamo guards on: graphs of before are found again if it changes back.
        """
        before, self.schedule = self.schedule, dataclasses.replace(self.schedule, **changes)
        if self.schedule == before:
            return
        self.plans.clear()
        reshard = self.schedule.reshard_of_unit(self.units, num_shards_of(self.mesh))
        for shard in shards:
            [unit] = units_of([shard])
            ahead = [dict(side).get(unit) for side in (self.schedule.forward_ahead, self.schedule.backward_ahead)]
            shard.key = f"{shard.key.partition('/')[0]}/{reshard.get(unit)} {ahead}"

    def forget_step(self) -> None:
        """Forget what a forward or backward left that ended in an exception, with the gradients that were kept."""
        self.is_finishing = self.is_checking = False
        self.come_back()
        for shard in self.shards:
            shard.reshard()
            shard.received.clear()
            if shard.accumulation is not None:
                shard.accumulation.clear()

    def check(self) -> None:
        """Between steps: parameters that were moved are views of their shards again."""
        for shard in self.shards:
            shard.check_views()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prepare(self, module: nn.Module) -> None:
        """Before a forward of `module`: parameters are views of their shards, and gradients will have a place to go."""
        self.refuse_if_summoned("the model")
        # Without graphs each time: eager code takes most of a step. With them, when something was registered anywhere.
        if torch.is_grad_enabled() and not (self.graphs and self.looked.get(module) == registrations().count):
            self.refuse_newcomers(module)
        self.is_finishing = self.is_checking = False
        if self.post_optim_event is not None:
            event, self.post_optim_event = self.post_optim_event, None
            event.wait()
        self.check()
        watch_whole(self)
        for shard in self.shards:
            shard.prepare()
        is_frozen = not any(shard.data.requires_grad for shard in self.shards)
        if is_frozen and torch.is_grad_enabled() and not any(shard.is_keeping for shard in self.shards):
            reduce_leftovers(self)  # no gradient of this step will be a reason to


def pipeline_of(
    schedule: ScheduleConfig,
    units: list[str],
    num_shards: int,
    parts: Mapping[int, metadata.Part],
    grouped: bool,
    plan: StepPlan | None = None,
) -> Pipeline:
    reshard = schedule.reshard_of_unit(units, num_shards)
    if plan is not None:
        reshard = dict.fromkeys(units, True) | reshard | dict.fromkeys(plan.kept, False)
    return Pipeline.of(
        reshard={unit: value if isinstance(value, bool) else parts[value] for unit, value in reshard.items()},
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=schedule.backward_prefetch,
        forward_ahead=schedule.forward_ahead,
        backward_ahead=schedule.backward_ahead,
        grouped=grouped,
        plan=plan,
        passes=schedule.passes,
        poison=schedule.poison,
        pin_memory=schedule.pin_memory,
    )


def leeway_of(
    schedule: ScheduleConfig, units: list[str], num_shards: int, parts: Mapping[int, metadata.Part], grouped: bool
) -> Leeway:
    """What a planner may choose from."""
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
    )


def units_of(shards: Iterable[FlatShard]) -> list[str]:
    return list(dict.fromkeys(ops.unit_of_bucket(shard.layout.bucket) for shard in shards))


def sharding_of(model: nn.Module) -> Sharding:
    found: Sharding = vars(model)["_fsdp_sharding"]
    return found


def sharding_around(module: nn.Module) -> Sharding:
    """Of a module that was sharded by itself: its own, or that of the model which it became a part of."""
    found: Sharding = vars(module).get("_fsdp_sharding") or vars(module)["_fsdp_part_of"]
    return found


def sharding_within(module: nn.Module) -> Sharding | None:
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
    """Tell the tensors that graphs take which sharding they belong to: shards, or the parameters of a single rank."""
    for shard in sharding.shards:
        shard.sharding = sharding
    if sharding.mesh is None:
        for parameter in model.parameters():
            parameter.fsdp_sharding = Membership(sharding)  # type: ignore[attr-defined]
