"""Sharding: the parameters of a module become DTensor views into flat shards, one shard for each bucket."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullOptimStateDictConfig, OptimStateDictConfig

from ..compiler.capture import activations_are_free
from ..compiler.options import CompileConfig
from ..compiler.statements import statement_of_program
from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..layout.buckets import Layout, Placement, lay_out
from ..layout.options import GradientReduction, OffloadConfig
from ..layout.precision import install_casts
from ..passes import metadata
from ..passes.pipeline import Pipeline
from ..passes.plan import StepPlan
from ..planning.options import ScheduleConfig
from ..planning.step_plans import Goal, Leeway, Planner
from ..runtime.compilations import Compilations
from ..runtime.flat_shard import FlatShard, Shards
from ..runtime.gradients import carry_hooks, reduce_leftovers, watch_whole
from ..runtime.groups import axes_of, is_nccl, num_shards_of, part_of
from ..runtime.optimizers import note_replacement
from ..runtime.reads import LocalRead, Read
from ..runtime.recomputation import checkpoint_in_forward
from ..runtime.registrations import registrations
from .decision import Decision
from .newcomers import Owner, newcomers, refuse
from .reading import Running, install_reads


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
        keeps_gradients: whether the next forwards' gradients are kept, to be reduced later.
        plans: what was planned, by program; see `step_plans.Planner`.
        has_raised: whether the last call has.
        compilations: graph breaks and recompilations, if it was compiled by `fsdp_compile`.
        compile: how the model was compiled, if it was.
        reason: why its strategy was chosen; None if the user said which.
        left: places of parameters that were left as they are.
        looked: how much was registered on modules when one was last called, and looked through for new parameters.
        is_summoned: whether full parameters are in the place of the sharded ones for now.
        optimizer_state: what `compat.FullyShardedDataParallel.optim_state_dict` gives.
    """

    units: list[str]
    schedule: ScheduleConfig
    together: tuple[nn.Module, ...] = ()
    parts: dict[int, metadata.Part] = dataclasses.field(default_factory=dict)
    running: Running = dataclasses.field(default_factory=Running)
    keeps_gradients: bool = False
    graphs: list[RewrittenGraphs] = dataclasses.field(default_factory=list)
    plans: dict[str, StepPlan | None] = dataclasses.field(default_factory=dict)
    has_raised: bool = False
    compilations: Compilations = dataclasses.field(default_factory=Compilations)
    compile: Compiler | None = None
    reason: str | None = None
    left: set[Owner] = dataclasses.field(default_factory=set)
    looked: Looked = dataclasses.field(default_factory=lambda: Looked())
    is_summoned: bool = False
    optimizer_state: OptimStateDictConfig = dataclasses.field(default_factory=FullOptimStateDictConfig)

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

    def reduce_by(self, reduction: GradientReduction) -> None:
        """From the next forward on, gradients are reduced so."""
        self.divisor = reduction.divisor
        for shard in self.shards:
            shard.change_layout(dataclasses.replace(shard.layout, reduction=reduction))

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
        self.check()
        watch_whole(self)
        for shard in self.shards:
            shard.prepare(keeps_gradients=self.keeps_gradients)
        is_frozen = not any(shard.data.requires_grad for shard in self.shards)
        if is_frozen and torch.is_grad_enabled() and not self.keeps_gradients:
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
        grouped=grouped,
        plan=plan,
        passes=schedule.passes,
        poison=schedule.poison,
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


def sharding_of(model: nn.Module) -> Sharding:
    found: Sharding = vars(model)["_fsdp_sharding"]
    return found


def is_sharded(module: nn.Module) -> bool:
    return "_fsdp_sharding" in vars(module)


def check_not_sharded(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError if one of the parameters is sharded already."""
    for name, parameter in parameters.items():
        if isinstance(parameter, torch.distributed.tensor.DTensor):
            raise ConfigError(f"{name} is a DTensor already; FSDP shards plain parameters")


def check_modules(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Raise ConfigError for modules that sharding `parameters` would break in silence.

    These are modules that write to their parameters in forward, and modules that keep parameters in attributes besides,
    where they would go on holding the old ones.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.max_norm is not None
            and module.weight in parameters
        ):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has max_norm, with which its forward writes to its "
                "weight, which is sharded: normalise the weight outside of forward"
            )
        for attribute, value in vars(module).items():
            if attribute == "_flat_weights" and isinstance(module, nn.RNNBase):
                continue  # reading.py replaces this list
            held = value if isinstance(value, (list, tuple)) else [value]
            if attribute != "_parameters" and any(
                isinstance(item, nn.Parameter) and item in parameters for item in held
            ):
                raise ConfigError(
                    f"{name or 'the model'} ({type(module).__name__}) also keeps parameters in its attribute "
                    f"{attribute!r}, which sharding cannot replace; such modules are not supported"
                )


def check_dense(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Raise ConfigError for a module whose gradients would be sparse, which only a single rank has a use for."""
    for name, module in model.named_modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.sparse
            and module.weight.requires_grad
            and module.weight in parameters
        ):
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has sparse=True, and ranks that look up other rows "
                "have no sum of sparse gradients that could be sharded: make it with sparse=False, or pass its weight "
                "in ignored_params"
            )


def shard_parameters(model: nn.Module, decision: Decision) -> Sharding:
    """Shard the parameters of `model`, in place. Everything that can be refused has been refused before."""
    sharding = Sharding(
        mesh=decision.mesh,
        units=[unit.name for unit in decision.units],
        schedule=decision.schedule,
        checks_gradients=decision.options.check_gradients,
    )
    if decision.mesh is None:
        _keep_whole(model, decision, sharding.running)
        sharding.divisor = decision.options.reduction.divisor
        sharding.whole = {name: (unit.name, value) for unit in decision.units for name, value in unit.parameters}
    else:
        reshard = decision.with_shards(num_shards_of(decision.mesh)).values()
        for size in sorted({value for value in reshard if not isinstance(value, bool)}):
            sharding.parts[size] = part_of(decision.mesh, size)
        _replace_parameters(model, decision, decision.mesh, sharding)
    install_casts(model, decision.precision)
    checkpoint_in_forward(model)
    vars(model)["_fsdp_sharding"] = sharding
    return sharding


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


def _keep_whole(model: nn.Module, decision: Decision, running: Running) -> None:
    """On a single rank parameters stay as they are; a forward may read them in another dtype, on another device."""
    compute_device = decision.compute_device if decision.options.offload.is_on else None
    if decision.options.param_init_fn is not None:
        for module in model.modules():
            _materialise(module, decision.options.param_init_fn)
    read_of_parameter: dict[nn.Parameter, Read | LocalRead] = {}
    for name, parameter in model.named_parameters():
        policy = decision.precision.policy_of_parameter.get(name)
        dtype = policy.param_dtype if policy else None
        if name in decision.parameters and (dtype is not None or compute_device is not None):
            read_of_parameter[parameter] = LocalRead(dtype, compute_device)
            if compute_device is not None and not parameter.is_meta:
                parameter.data = _on_cpu(parameter.data, decision.options.offload)
    if read_of_parameter:
        install_reads(model, read_of_parameter, running)


def _on_cpu(tensor: torch.Tensor, offload: OffloadConfig) -> torch.Tensor:
    on_cpu = tensor.to("cpu")
    return on_cpu.pin_memory() if offload.pin_memory and torch.cuda.is_available() else on_cpu


def owners_of_parameters(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """For every parameter the modules that hold it, and its name there; tied ones have several."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    return owners


def _replace_parameters(model: nn.Module, decision: Decision, mesh: DeviceMesh, sharding: Sharding) -> None:
    owners = owners_of_parameters(model)
    values = _Values(decision, mesh)
    if decision.options.sync_module_states:
        values.broadcast(model.buffers())
    read_of_parameter: dict[nn.Parameter, Read | LocalRead] = {}
    sharded_of_original = {}
    for layout in _layouts(decision, mesh):
        originals = [decision.parameters[slot.parameter] for slot in layout.slots]
        first_owners = [owners[original][0] for original in originals]
        tensors = [values.of(original, *owner) for original, owner in zip(originals, first_owners, strict=True)]
        if decision.options.param_init_fn is not None and layout.device.type == "meta":
            layout = dataclasses.replace(
                layout, device=torch.device("cpu") if decision.options.offload.is_on else tensors[0].device
            )
        is_pinned = decision.options.offload.pin_memory and torch.cuda.is_available() and layout.device.type == "cpu"
        shard = FlatShard.create(layout, tensors, first_owners, mesh, pin_memory=is_pinned)
        sharding.shards.append(shard)
        for index, (slot, original) in enumerate(zip(layout.slots, originals, strict=True)):
            read = Read(shard, layout.unshard_arguments(slot), is_frozen=not layout.requires_grad)
            shard.reads.append(read)
            read_of_parameter[original], sharded_of_original[original] = read, shard.parameters[index]
    install_reads(model, read_of_parameter, sharding.running)
    for original, sharded in sharded_of_original.items():
        for module, name in owners[original]:
            module._parameters[name] = sharded
        carry_hooks(original, sharded)
        note_replacement(original, sharded, read_of_parameter[original])


def _layouts(decision: Decision, mesh: DeviceMesh) -> list[Layout]:
    has_scalars = any(parameter.dim() == 0 for parameter in decision.parameters.values())
    placement = Placement(
        axes_of(mesh, decision.options.strategy, has_scalars=has_scalars),
        decision.options.reduction,
        decision.precision.policy_of_parameter,
        decision.compute_device if decision.options.offload.is_on else None,
    )
    return lay_out(decision.units, placement)


class _Values:
    """The full values of parameters, one after another: given memory where they have none, and synchronised."""

    def __init__(self, decision: Decision, mesh: DeviceMesh) -> None:
        self.decision, self.mesh = decision, mesh
        self.made: dict[tuple[nn.Module, str], torch.Tensor] = {}

    def of(self, original: nn.Parameter, module: nn.Module, name: str) -> torch.Tensor:
        """The value of a parameter that `module` holds as `name`."""
        value = original.detach()
        if value.is_meta and self.decision.options.param_init_fn is not None:
            if (module, name) not in self.made:
                originals = dict(module._parameters)
                _materialise(module, self.decision.options.param_init_fn)
                for made_name, made in module._parameters.items():
                    if made is not None:
                        self.made[module, made_name] = made.detach()
                module._parameters.update(originals)  # until all of them are replaced
                if self.decision.options.sync_module_states:
                    self.broadcast(module._buffers.values())
            value = self.made.pop((module, name))
        if self.decision.options.sync_module_states:
            self.broadcast([value])
        return value

    def broadcast(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """The values of the mesh's first rank, to all."""
        for tensor in tensors:
            if tensor is not None and not tensor.is_meta:
                data = tensor.detach().to(
                    self.decision.compute_device if self.decision.options.offload.is_on else tensor.device
                )
                data = data.contiguous()
                for dim in reversed(range(self.mesh.ndim)):  # along the first row, then from row to row
                    group = self.mesh.get_group(dim)
                    dist.broadcast(data, src=dist.get_global_rank(group, 0), group=group)
                tensor.detach().copy_(data)


def _materialise(module: nn.Module, param_init_fn: Callable[[nn.Module], Any]) -> None:
    """Call `param_init_fn` if the module itself holds tensors on the meta device.

    Raises:
        ConfigError: it has left some of them there, or changed their shapes or dtypes.
    """

    def held() -> dict[str, torch.Tensor]:
        return {name: t for name, t in {**module._parameters, **module._buffers}.items() if t is not None}

    before = {name: (tensor.shape, tensor.dtype) for name, tensor in held().items()}
    if not any(tensor.is_meta for tensor in held().values()):
        return
    param_init_fn(module)
    for name, tensor in held().items():
        if tensor.is_meta or before.get(name) != (tensor.shape, tensor.dtype):
            raise ConfigError(
                f"param_init_fn left {name} of a {type(module).__name__} on the meta device, or changed its shape or "
                "dtype: it is to give values to all that the module itself holds, as "
                "module.to_empty(device=..., recurse=False) and then module.reset_parameters() do"
            )
