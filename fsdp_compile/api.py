"""fsdp_compile, shard, rewrite: read from top to bottom, they tell the whole story."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.utils._pytree import tree_map_only

from .backend import CompileAs
from .checks import check_bool, check_call, listed
from .compiler.capture import capture_only, inductor_options
from .compiler.options import CompileConfig
from .costs.calibrate import calibrate
from .costs.hardware import Hardware, find_hardware, hardware_of_gpu
from .errors import CaptureError, ConfigError
from .graphs import RewrittenGraphs
from .layout.buckets import NO_AXIS, Axes, Axis, Placement, check_parameters, lay_out
from .layout.options import GradientReduction, OffloadConfig, check_strategy
from .layout.precision import find_precision, install_casts
from .layout.units import Unit, find_units
from .module.adoption import adopt, adopted_parameters, check_mesh, common_mesh, sharded_parts
from .module.decision import Decision, compute_device, statement_of_decision
from .module.newcomers import newcomers, owners_left, refuse
from .module.reading import off_meta, reading_copy
from .module.sharded_module import become_sharded
from .module.sharding import (
    check_dense,
    check_modules,
    check_not_sharded,
    note_sharding,
    options_of,
    pipeline_of,
    shard_parameters,
    sharding_of,
)
from .passes import ops
from .passes.pipeline import Pass
from .planning.options import ScheduleConfig, num_bytes_of
from .planning.step_plans import Goal, Planner
from .planning.strategies import (
    Auto,
    Choice,
    best_strategy,
    candidates,
    check_example_inputs,
    check_open,
    first_ranks_choice,
    is_auto,
)
from .runtime.agreement import agreement_of
from .runtime.groups import device_of, num_shards_of, resolve_mesh
from .runtime.wrappers import refuse_wrapped

_MOST_RANKS = 2**31


def fsdp_compile(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    auto_wrap_policy: Any = "auto",
    sharding_strategy: ShardingStrategy | Auto = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    backward_prefetch: Any = "auto",
    forward_prefetch: Any = "auto",
    collective_lowering: str = "auto",
    memory_budget: int | str | None = None,
    hardware: Hardware | str | None = None,
    example_inputs: Sequence[Any] | torch.Tensor | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    sync_module_states: bool = True,
    gradient_reduction: str | float = "mean",
    check_gradients: bool = False,
    passes: Sequence[Pass] = (),
    backend: str = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Shard `model` over the ranks and compile it, in place.

    Parameters become DTensors (`Shard(0)`) under their names; a call of the model runs compiled graphs that gather each
    unit of parameters before its use, free it after, and reduce its gradients. With a single rank nothing is sharded.
    Modules of the model that were sharded before keep their units and options, and become a part of its program.

    Args:
        mesh: one dimension to shard over, or two (replicate, shard); by default all ranks. With no process group
            initialised, `WORLD_SIZE` in the environment initialises one (NCCL for CUDA, else gloo).
        process_group: the ranks to shard over, instead of a mesh; a pair (shard, replicate) for hybrid sharding.
        auto_wrap_policy: which modules are units; see `fsdp_compile.layout.units.find_units`.
        sharding_strategy: torch's; FULL_SHARD on a mesh of two dimensions is HYBRID_SHARD. SHARD_GRAD_OP keeps
            parameters gathered between forward and backward, NO_SHARD keeps them whole and all-reduces gradients.
            "auto" takes the one that is predicted to be the fastest that fits; `model.explain()` says why.
        reshard_after_forward: None leaves it to the strategy: all units are freed after the forward but the one used
            last. True frees all, False none; a number of ranks shards them over groups of that size until the
            backward; a map from globs over unit names to bools and numbers decides for the units it matches.
        mp_policy: torch's MixedPrecisionPolicy, or a map to such policies from module classes and globs over module
            names; see `fsdp_compile.layout.precision.find_precision`. Shards are cast before they are gathered;
            parameters, their gradients and the optimizer's states keep their dtype.
        offload_policy: torch's CPUOffloadPolicy (or CPUOffload): shards, gradients and the optimizer's states live on
            the CPU.
        backward_prefetch: "auto" (1), how many units ahead the backward gathers, or torch's BackwardPrefetch.
        forward_prefetch: "auto" (1), how many units ahead the forward gathers, or a bool.
        collective_lowering: "packed" sends a bucket as one buffer, "grouped" as one message for each parameter in one
            call, without copies; "auto" is grouped on NCCL and packed elsewhere.
        ignored_params: parameters that are left as they are: not sharded, not synchronised, gradients not reduced.
        param_init_fn: called with every module that holds tensors on the meta device, one unit after another, to give
            its own tensors memory and values. Without it parameters on the meta device stay there, sharded.
        sync_module_states: give every rank the parameters and buffers of the first.
        gradient_reduction: "mean" or "sum" over the ranks, or a number that the sum is divided by.
        check_gradients: whether a backward raises NonFiniteError, on every rank, if a gradient of any is infinite or
            NaN; for debugging: it waits for all gradients. What no_sync keeps is checked when it is reduced.
        passes: your own, objects of dataclasses that change a graph in place. They are called with the forward and the
            backward once these are in order, and what they leave is verified; see docs/writing_a_pass.md.
        backend: "inductor", or "aot_eager": the same passes, with eager's operators and no code generation.
        fullgraph, dynamic, options: passed on to torch.compile and Inductor.
        memory_budget: bytes (or text such as "16 GiB") that a rank may hold during a step, all told. The schedule is
            planned to fit; if none does, an error when the model is first called says what is missing. It takes an
            optimizer with two states, and implies fullgraph: what other graphs hold would not be counted.
        hardware: what the schedule is planned for: a name of `costs.HARDWARE`, a profile that `calibrate` wrote, or a
            description. With it (or a budget) units are gathered together, early, and kept between forward and backward
            as the cost model says is fastest; without a budget, within the memory that it has. None is the GPU at hand
            if only a budget or "auto" is given, and is measured where that is not known, by all ranks, in a few
            seconds.
        example_inputs: the positional arguments of a call, which sharding_strategy="auto" is chosen for: a tuple or
            list, or the only tensor. Tensors may be on the meta device; nothing is computed with them.

    Returns:
        The same object. `model.graphs` lists the rewritten graphs compiled so far.

    Raises:
        ConfigError: an argument or the model asks for something that is not supported; the model is untouched.
    """
    config = CompileConfig(backend, fullgraph, dynamic, inductor_options(options))
    if memory_budget is not None:
        config = dataclasses.replace(config, fullgraph=True)
    shard(
        model,
        mesh,
        process_group=process_group,
        auto_wrap_policy=auto_wrap_policy,
        sharding_strategy=sharding_strategy,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        collective_lowering=collective_lowering,
        memory_budget=memory_budget,
        hardware=hardware,
        example_inputs=example_inputs,
        ignored_params=ignored_params,
        param_init_fn=param_init_fn,
        sync_module_states=sync_module_states,
        gradient_reduction=gradient_reduction,
        check_gradients=check_gradients,
        passes=passes,
    )
    compile_as = CompileAs(config)
    compile_as(model)
    sharding_of(model).compile = compile_as
    return model


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
    auto_wrap_policy: Any = "auto",
    sharding_strategy: ShardingStrategy | Auto = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    backward_prefetch: Any = "auto",
    forward_prefetch: Any = "auto",
    collective_lowering: str = "auto",
    memory_budget: int | str | None = None,
    hardware: Hardware | str | None = None,
    example_inputs: Sequence[Any] | torch.Tensor | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    sync_module_states: bool = True,
    gradient_reduction: str | float = "mean",
    check_gradients: bool = False,
    passes: Sequence[Pass] = (),
) -> nn.Module:
    """Shard `model` in place, without compiling it: it runs in eager, one parameter gathered at a time.

    `torch.compile(model, backend="fsdp")` compiles it to the graphs that `fsdp_compile` makes. The arguments are those
    of `fsdp_compile`; the ones about the schedule take effect when the model is compiled.
    """
    check_bool("sync_module_states", sync_module_states)
    check_bool("check_gradients", check_gradients)
    if param_init_fn is not None:
        if not callable(param_init_fn) or isinstance(param_init_fn, type):
            raise ConfigError(f"param_init_fn is a function that takes a module, not {param_init_fn!r}")
        check_call("param_init_fn", param_init_fn, "module")
    ignored_params = _ignored(ignored_params)
    if isinstance(auto_wrap_policy, Iterator):  # several strategies may be tried
        auto_wrap_policy = list(auto_wrap_policy)
    reason = None
    check_example_inputs(sharding_strategy, example_inputs)
    if is_auto(sharding_strategy):
        check_open(reshard_after_forward, OffloadConfig.of(offload_policy))
        chosen = _choose(
            model,
            mesh,
            process_group,
            example_inputs,
            memory_budget,
            hardware,
            auto_wrap_policy=auto_wrap_policy,
            mp_policy=mp_policy,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            collective_lowering=collective_lowering,
            ignored_params=ignored_params,
            gradient_reduction=gradient_reduction,
            passes=passes,
        )
        sharding_strategy, reason, hardware = chosen.strategy, chosen.reason, chosen.hardware
        mesh, process_group = chosen.mesh, chosen.process_group
    strategy = check_strategy(sharding_strategy)
    schedule = ScheduleConfig.of(
        strategy,
        reshard_after_forward,
        forward_prefetch,
        backward_prefetch,
        collective_lowering,
        memory_budget,
        None if hardware is None else find_hardware(hardware),
        passes,
        _poisons(),
    )
    reduction, offload = GradientReduction.of(gradient_reduction), OffloadConfig.of(offload_policy)
    parameters = _check_model(model, ignored_params)
    parts = sharded_parts(model)
    units = find_units(model, auto_wrap_policy, frozenset(model.parameters()) - frozenset(parameters.values()))
    schedule.check_globs([unit.name for unit in units])
    precision = find_precision(model, mp_policy, _modules_of(units, model))
    device = device_of(parameters)
    if mesh is None and process_group is None:
        mesh = common_mesh(parts)
        initialise_from_environment(device)
    local_world_size = _local_world_size()
    resolved = resolve_mesh(
        mesh, process_group, device, strategy, is_offloaded=offload.is_on, local_world_size=local_world_size
    )
    if resolved is not None:
        check_dense(model, set(parameters.values()))
    schedule.reshard_of_unit([unit.name for unit in units], num_shards_of(resolved))
    decision = Decision(
        units,
        parameters,
        resolved,
        strategy,
        schedule,
        reduction,
        precision,
        offload,
        sync_module_states,
        param_init_fn,
        check_gradients,
    )
    check_mesh(parts, resolved)
    if schedule.memory_budget is not None and schedule.hardware is None:
        found = _hardware_at_hand(decision.compute_device, resolved, local_world_size)
        decision = dataclasses.replace(decision, schedule=dataclasses.replace(schedule, hardware=found))
    if (agreement := agreement_of(resolved)) is not None:
        agreement.agree(statement_of_decision(decision))
    sharding = shard_parameters(model, decision)
    sharding.reason = reason
    adopt(model, parts, sharding)
    note_sharding(model, sharding)
    sharding.left = owners_left(model)
    become_sharded(model)
    return model


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """What "auto" became, as the arguments of `shard`, and why."""

    strategy: ShardingStrategy
    reason: str
    mesh: DeviceMesh | None
    process_group: Any
    hardware: Hardware | str | None


def _choose(
    model: nn.Module,
    mesh: DeviceMesh | None,
    process_group: Any,
    example_inputs: Any,
    memory_budget: int | str | None,
    hardware: Hardware | str | None,
    *,
    ignored_params: list[nn.Parameter],
    **options: Any,
) -> _Chosen:
    """Choose the strategy, on the first rank, for all. Every rank of the mesh calls this; `options` are `rewrite`'s."""
    device = device_of(_check_model(model, ignored_params))
    if parts := sharded_parts(model):
        raise ConfigError(f"sharding_strategy='auto' is for a whole model, and {next(iter(parts))} is sharded already")
    goal_of = partial(Goal, memory_budget=num_bytes_of(memory_budget), compiler="inductor")
    hardware = None if hardware is None else find_hardware(hardware)
    is_given = mesh is not None or process_group is not None
    if not is_given:
        initialise_from_environment(device)
    resolved = resolve_mesh(mesh, process_group, device, ShardingStrategy.FULL_SHARD)
    if resolved is None:
        reason = "a single rank shards nothing, by any strategy."
        return _Chosen(ShardingStrategy.FULL_SHARD, reason, mesh, process_group, hardware)
    if hardware is None:
        hardware = _hardware_at_hand(compute_device(device, resolved), resolved, _local_world_size())
    ranks_per_node = _local_world_size() or hardware.ranks_per_node
    shape: Any = resolved.size() if resolved.ndim == 1 else tuple(resolved.shape)
    rewrites = candidates(
        partial(rewrite, model, *_inputs_on(device, example_inputs), ignored_params=ignored_params, **options),
        shape,
        goal_of(hardware),
        None if is_given else ranks_per_node,
    )

    def choose() -> Choice:
        try:
            return best_strategy(rewrites, goal_of(hardware))
        except CaptureError as e:
            raise CaptureError(f"sharding_strategy='auto' calls the model with example_inputs: {e}") from e

    strategy, reason = first_ranks_choice(resolved, choose)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        resolved = resolve_mesh(None, None, device, strategy, local_world_size=ranks_per_node)
    return _Chosen(strategy, reason, resolved, None, hardware)


def _inputs_on(device: torch.device, example_inputs: Any) -> tuple[Any, ...]:
    """The arguments of a call, where the model can be traced with them."""
    inputs = (example_inputs,) if torch.is_tensor(example_inputs) else tuple(example_inputs)
    if device.type == "meta":  # it will be traced as for the CPU
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
    return off_meta(inputs, "cpu" if device.type == "meta" else device)  # type: ignore[no-any-return]


def _poisons() -> bool:
    """Whether freed buffers are filled with NaN, a debug mode: FSDP_COMPILE_POISON=1 in the environment."""
    value = os.environ.get("FSDP_COMPILE_POISON", "0")
    if value not in ("0", "1"):
        raise ConfigError(f"FSDP_COMPILE_POISON is 0 or 1, not {value!r}")
    return value == "1"


def _local_world_size() -> int | None:
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


def _hardware_at_hand(device: torch.device, mesh: DeviceMesh | None, ranks_per_node: int | None) -> Hardware:
    """The GPU at hand, or what is measured. Every rank of the mesh calls this."""
    hardware = hardware_of_gpu() if device.type == "cuda" else None
    if hardware is None:
        if mesh is not None and mesh.size() != dist.get_world_size():
            raise ConfigError("planning for a part of the ranks needs hardware=: only all of them can be measured")
        hardware = calibrate(device, ranks_per_node=ranks_per_node or 1)
    return hardware


def rewrite(
    model: nn.Module,
    *args: Any,
    world_size: int | tuple[int, int],
    auto_wrap_policy: Any = "auto",
    sharding_strategy: ShardingStrategy | Auto = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: Any = None,
    mp_policy: Any = None,
    backward_prefetch: Any = "auto",
    forward_prefetch: Any = "auto",
    collective_lowering: str = "packed",
    memory_budget: int | str | None = None,
    hardware: Hardware | str | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    gradient_reduction: str | float = "mean",
    passes: Sequence[Pass] = (),
    **kwargs: Any,
) -> RewrittenGraphs:
    """The graphs that a rank would compile for `model(*args, **kwargs)`.

    Nothing runs: no process group, no other process, no memory is touched. Model and inputs may be on the meta device,
    and are then traced as for the CPU. The model is not changed. Options are those of `fsdp_compile`; other keyword
    arguments go to the model.

    Args:
        world_size: the number of ranks; a pair (replicas, ranks to shard over) for hybrid sharding.

    Raises:
        ConfigError: as `fsdp_compile`.
        CaptureError: the call cannot be traced as one graph.
    """
    found = None if hardware is None else find_hardware(hardware)
    ignored_params = _ignored(ignored_params)
    if isinstance(auto_wrap_policy, Iterator):  # several strategies may be tried
        auto_wrap_policy = list(auto_wrap_policy)
    if is_auto(collective_lowering) and found is None:
        raise ConfigError("collective_lowering='auto' depends on a process group: choose 'packed' or 'grouped'")
    if memory_budget is not None and found is None:
        raise ConfigError("memory_budget needs hardware= to plan for")
    if is_auto(sharding_strategy):
        if found is None:
            raise ConfigError("sharding_strategy='auto' needs hardware= to choose for")
        check_open(reshard_after_forward, OffloadConfig())
        again = partial(
            rewrite,
            model,
            *args,
            auto_wrap_policy=auto_wrap_policy,
            mp_policy=mp_policy,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
            collective_lowering=collective_lowering,
            ignored_params=ignored_params,
            gradient_reduction=gradient_reduction,
            passes=passes,
            **kwargs,
        )
        goal = Goal(found, num_bytes_of(memory_budget), "inductor")
        return best_strategy(candidates(again, world_size, goal, found.ranks_per_node), goal).graphs
    strategy = check_strategy(sharding_strategy)
    axes = _axes_of_size(world_size, strategy)
    schedule = ScheduleConfig.of(
        strategy,
        reshard_after_forward,
        forward_prefetch,
        backward_prefetch,
        collective_lowering,
        memory_budget,
        found,
        passes,
        _poisons(),
    )
    reduction = GradientReduction.of(gradient_reduction)
    parameters = _check_model(model, ignored_params)
    if parts := sharded_parts(model):
        raise ConfigError(
            f"rewrite takes a model that is not sharded, and {next(iter(parts))} is: look at its `graphs`"
        )
    units = find_units(model, auto_wrap_policy, frozenset(model.parameters()) - frozenset(parameters.values()))
    names = [unit.name for unit in units]
    schedule.check_globs(names)
    precision = find_precision(model, mp_policy, _modules_of(units, model))
    if axes.everyone.size > 1:
        check_dense(model, set(parameters.values()))
    placement = Placement(axes, reduction, precision.policy_of_parameter)
    layouts = lay_out(units, placement) if axes.everyone.size > 1 else []
    reshard = schedule.reshard_of_unit(names, axes.shards.size).values()
    places = {size: ops.Part(size, f"shard/{size}", 0) for size in reshard if not isinstance(size, bool)}
    reading = reading_copy(model, layouts)
    install_casts(reading, precision)
    args, kwargs = off_meta((args, kwargs))
    open_options = schedule, names, axes.shards.size, places, collective_lowering != "packed"
    pipeline = partial(pipeline_of, *open_options)
    if found is None:
        return capture_only(reading, args, kwargs, pipeline)
    planner = Planner(options_of(*open_options), Goal(found, schedule.memory_budget, "inductor"), {}, _alone)
    return capture_only(reading, args, kwargs, pipeline, planner.plan)


def _alone(program: str, make: Callable[[], str]) -> str:
    return make()


def _axes_of_size(world_size: object, strategy: ShardingStrategy) -> Axes:
    sizes: Any = world_size if isinstance(world_size, tuple) and len(world_size) == 2 else (1, world_size)
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < _MOST_RANKS for size in sizes):
        raise ConfigError(f"world_size is a positive int (below 2**31) or a pair of them, not {world_size!r}")
    everyone = Axis(sizes[0] * sizes[1], "shard" if sizes[0] == 1 else "world")
    if strategy is ShardingStrategy.NO_SHARD:
        return Axes(NO_AXIS, everyone, everyone)
    return Axes(Axis(sizes[1], "shard"), Axis(sizes[0], "replicate") if sizes[0] > 1 else NO_AXIS, everyone)


def _ignored(ignored_params: object) -> list[nn.Parameter]:
    return [] if ignored_params is None else listed("ignored_params", ignored_params, "parameters")


def _check_model(model: object, ignored: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters to shard, by name; raises ConfigError for a model that cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is an nn.Module, not {type(model).__name__}")
    held = set(model.parameters())
    for parameter in ignored:
        if not isinstance(parameter, nn.Parameter) or parameter not in held:
            found = f"a tensor of shape {tuple(parameter.shape)}" if torch.is_tensor(parameter) else repr(parameter)
            raise ConfigError(f"ignored_params holds parameters of the model, and {found} is none")
    parts = sharded_parts(model)
    for name, part in parts.items():
        came = newcomers(part, sharding_of(part).left)
        refuse([f"{name}.{inner}" for inner, parameter in came.items() if parameter not in set(ignored)], name)
    left_out = {*ignored, *adopted_parameters(model, parts)}
    parameters = {name: value for name, value in model.named_parameters() if value not in left_out}
    refuse_wrapped(model, set(parameters.values()))
    check_not_sharded(parameters)
    check_parameters(parameters)
    check_modules(model, set(parameters.values()))
    return parameters


def _modules_of(units: list[Unit], model: nn.Module) -> list[str]:
    """The names of the modules that are units."""
    names = {name for name, _ in model.named_modules()}
    return [unit.name for unit in units if unit.name in names and not unit.is_run]


def initialise_from_environment(device: torch.device) -> None:
    """Initialise the default process group if torchrun started several ranks and nobody has."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_cuda = device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())
        dist.init_process_group("nccl" if on_cuda else "gloo")
