"""fsdp_compile, shard, rewrite: read from top to bottom, they tell the whole story."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.utils._pytree import tree_map_only

from .backend import CompileAs
from .checks import is_auto
from .compiler.inductor_options import inductor_options
from .compiler.options import CompileConfig
from .costs.at_hand import hardware_at_hand
from .costs.hardware import Hardware
from .costs.predict import Prediction
from .environment import initialise_from_environment, local_world_size
from .errors import CaptureError, ConfigError
from .graphs import RewrittenGraphs
from .layout.unit_meshes import find_meshes
from .module.adoption import adopt, check_mesh, common_mesh, holders_of, ranks_of, sharded_parts
from .module.decide import check_model, decide
from .module.decision import (
    Decision,
    check_dense,
    check_distributed,
    check_own_meshes,
    compute_device,
    statement_of_decision,
)
from .module.newcomers import owners_left
from .module.pretrained import mark_pretrained
from .module.replacement import shard_parameters
from .module.sharded_module import become_sharded
from .module.sharding import note_sharding, sharding_of
from .options import Options, options_of, taken, takes
from .planning.step_plans import Goal
from .planning.strategies import (
    Choice,
    WorldSize,
    best_strategy,
    candidates,
    check_example_inputs,
    first_ranks_choice,
)
from .progress import phase
from .rewriting import Rewriter, rewrite_for
from .runtime.agreement import agreement_of
from .runtime.groups import device_of, device_to_shard_on, mesh_beside, num_shards_of, resolve_mesh
from .runtime.interruption import end_in_one_line
from .runtime.meta import off_meta

Meshes: TypeAlias = "DeviceMesh | Mapping[str, DeviceMesh] | None"


@takes(Options, CompileConfig)
def fsdp_compile(model: nn.Module, mesh: Meshes = None, **arguments: Any) -> nn.Module:
    """Shard `model` over the ranks and compile it, in place.

    Parameters become DTensors (`Shard(0)`) under their names; a call of the model runs compiled graphs that gather each
    unit of parameters before its use, free it after, and reduce its gradients. With a single rank nothing is sharded.
    Modules of the model that were sharded before keep their units and options, and become a part of its program.

    Args:
        mesh: one dimension to shard over, or two (replicate, shard); by default all ranks. With no process group
            initialised, `WORLD_SIZE` in the environment initialises one (NCCL for CUDA, else gloo). A model in the
            CPU's memory goes to the GPU of its rank if the mesh, or all that the process group serves, is GPUs.
            A map to meshes from globs over module names ("" is the model itself) gives modules a mesh of their own, as
            experts have that are split over the other ranks; see `fsdp_compile.layout.unit_meshes.find_meshes`. A mean
            of gradients is still over the ranks of the model.
        process_group: the ranks to shard over, instead of a mesh; a pair (shard, replicate) for hybrid sharding.
        auto_wrap_policy: which modules are units; see `fsdp_compile.layout.units.find_units`.
        sharding_strategy: torch's; FULL_SHARD on a mesh of two dimensions is HYBRID_SHARD. SHARD_GRAD_OP keeps
            parameters gathered between forward and backward, NO_SHARD keeps them whole and all-reduces gradients.
            "auto" takes the one that is predicted to be the fastest that fits; `model.explain()` says why.
        reshard_after_forward: None leaves it to the strategy: all units are freed after the forward but the one used
            last. True frees all, False none; a number of ranks shards them over groups of that size until the
            backward; a map from globs over unit names to bools and numbers decides for the units it matches.
        shard_placement_fn: called with every parameter, before it is sharded; returns the Shard(dim) that it gets, of
            any dimension, divisible by the ranks or not, or None for Shard(0). Negative ones count from the end.
            Torch's ShardPlacementResult gives it a mesh of its own, over whose ranks a mean of its gradients is.
        mp_policy: torch's MixedPrecisionPolicy, or a map to such policies from module classes and globs over module
            names; see `fsdp_compile.layout.precision.find_precision`. Shards are cast before they are gathered;
            parameters, their gradients and the optimizer's states keep their dtype.
        communication_dtype: in which form gathers and reductions send: a `CommunicationDtype` ("int8", "int4",
            bfloat16, float16), or a map to these from globs over unit names. "auto" sends nothing that is not equal to
            the last bit: it casts before a gather what the program casts behind it.
        offload_policy: torch's CPUOffloadPolicy (or CPUOffload): shards, gradients and the optimizer's states live on
            the CPU.
        backward_prefetch: "auto" (1), how many units ahead the backward gathers, or torch's BackwardPrefetch.
        forward_prefetch: "auto" (1), how many units ahead the forward gathers, or a bool.
        collective_lowering: "packed" sends a bucket as one buffer, "grouped" as one message for each parameter in one
            call, without copies; "auto" is grouped on NCCL and packed elsewhere.
        collective_pieces: into how many pieces each gather and reduction of activations is decomposed that the model
            itself calls, as of tensor parallelism, so that it runs beside the matmuls that read or feed it. "auto"
            leaves that to a plan, and is 1 without one.
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
            description. Units are gathered together, early, and kept between forward and backward as the cost model
            says is fastest; without a budget, within the memory that the hardware has. "auto" is the hardware at hand:
            a GPU by its name, or what all ranks measure, once (see docs/planning.md); without a budget, the plan holds
            no more than the schedule does without one. It plans nothing for a model with `passes`, numbers for
            prefetching, or a part of the ranks. False, or None, plans nothing, unless a budget or
            sharding_strategy="auto" asks for a plan for the hardware at hand.
        example_inputs: the positional arguments of a call, which sharding_strategy="auto" is chosen for: a tuple or
            list, or the only tensor. Tensors may be on the meta device; nothing is computed with them.

    Returns:
        The same object. `model.graphs` lists the rewritten graphs compiled so far.

    Raises:
        ConfigError: an argument or the model asks for something that is not supported; the model is untouched.
        TypeError: there is no such argument.
    """
    arguments["options"] = inductor_options(arguments.get("options"))
    config, options = taken(CompileConfig, arguments), options_of("fsdp_compile", arguments)
    _shard(model, mesh, options)
    compile_as = CompileAs(config if options.memory_budget is None else dataclasses.replace(config, fullgraph=True))
    compile_as(model)
    sharding_of(model).compile = compile_as
    return model


@takes(Options)
def shard(model: nn.Module, mesh: Meshes = None, **arguments: Any) -> nn.Module:
    """Shard `model` in place, without compiling it: it runs in eager, one parameter gathered at a time.

    `torch.compile(model, backend="fsdp")` compiles it to the graphs that `fsdp_compile` makes. The arguments are those
    of `fsdp_compile`; the ones about the schedule take effect when the model is compiled.
    """
    return _shard(model, mesh, options_of("shard", arguments))


def _shard(model: nn.Module, mesh: Meshes, options: Options) -> nn.Module:
    with phase("sharding", of=type(model).__name__):
        return _sharded(model, mesh, options)


def _sharded(model: nn.Module, mesh: Meshes, options: Options) -> nn.Module:
    check_example_inputs(options.sharding_strategy, options.example_inputs)
    main, own_meshes = find_meshes(model, mesh)
    reason = None
    if options.is_auto:
        if own_meshes:
            raise ConfigError("sharding_strategy='auto' is for a model on one mesh, and mesh is a map to several")
        main, options, reason = _choose(model, main, options)
    decision = decide(model, options, own_meshes)
    parts = sharded_parts(model)
    decision = _on_ranks(model, parts, main, decision)
    if (agreement := agreement_of(decision.mesh)) is not None:
        agreement.agree(statement_of_decision(decision))
    holders = holders_of(decision, parts)
    sharding = shard_parameters(model, decision)
    sharding.reason, sharding.holders = reason, holders
    adopt(model, parts, sharding)
    note_sharding(model, sharding)
    sharding.left = owners_left(model)
    become_sharded(model)
    end_in_one_line()
    if decision.mesh is not None:
        mark_pretrained(model, decision.mesh.size())
    return model


def _on_ranks(model: nn.Module, parts: dict[str, nn.Module], mesh: DeviceMesh | None, decision: Decision) -> Decision:
    """The decision for the ranks that there are. Every rank calls this; they may initialise the process group."""
    options, device = decision.options, device_of(decision.parameters)
    is_given = mesh is not None or options.process_group is not None
    if not is_given:
        mesh = common_mesh(parts) or mesh_beside(decision.inner)
        initialise_from_environment(device)
    device = device_to_shard_on(device, mesh, options.process_group)
    resolved = resolve_mesh(
        mesh,
        options.process_group,
        device,
        options.strategy,
        is_offloaded=options.offload.is_on,
        local_world_size=local_world_size(),
    )
    if resolved is not None:
        check_dense(model, set(decision.parameters.values()))
    decision.with_shards(num_shards_of(resolved))  # raises for a number that does not divide the ranks
    decision = dataclasses.replace(decision, device=device, mesh=resolved, is_alone=is_given and resolved is None)
    check_distributed(decision)
    check_own_meshes(decision)
    check_mesh(parts, resolved)
    decision = dataclasses.replace(decision, ranks=ranks_of(decision, parts))
    schedule, device = decision.schedule, decision.compute_device
    if schedule.hardware is None and (schedule.memory_budget is not None or decision.is_planned_by_default):
        find = hardware_at_hand if decision.is_planned_by_default else _hardware_to_plan_for
        hardware = find(device, resolved, local_world_size())
        decision = dataclasses.replace(decision, schedule=dataclasses.replace(schedule, hardware=hardware))
    return decision


def _hardware_to_plan_for(device: torch.device, mesh: DeviceMesh | None, ranks_per_node: int | None) -> Hardware:
    """As `hardware_at_hand`; ConfigError where that is not known."""
    hardware = hardware_at_hand(device, mesh, ranks_per_node)
    if hardware is None:
        raise ConfigError("planning for a part of the ranks needs hardware=: only all of them can be measured")
    return hardware


def _choose(model: nn.Module, mesh: DeviceMesh | None, options: Options) -> tuple[DeviceMesh | None, Options, str]:
    """Choose the strategy, on the first rank, for all. Every rank of the mesh calls this.

    Returns:
        The mesh, the options with what was chosen, and why.
    """
    device = device_of(check_model(model, options.ignored))
    if parts := sharded_parts(model):
        raise ConfigError(f"sharding_strategy='auto' is for a whole model, and {next(iter(parts))} is sharded already")
    hardware, is_given = options.schedule.hardware, mesh is not None or options.process_group is not None
    if not is_given:
        initialise_from_environment(device)
    device = device_to_shard_on(device, mesh, options.process_group)
    resolved = resolve_mesh(mesh, options.process_group, device, ShardingStrategy.FULL_SHARD)
    chosen = dataclasses.replace(options, sharding_strategy=ShardingStrategy.FULL_SHARD, example_inputs=None)
    if resolved is None:
        return mesh, chosen, "a single rank shards nothing, by any strategy."
    if hardware is None:
        hardware = _hardware_to_plan_for(compute_device(device, resolved), resolved, local_world_size())
    ranks_per_node = local_world_size() or hardware.ranks_per_node
    shape: Any = resolved.size() if resolved.ndim == 1 else tuple(resolved.shape)
    goal = Goal(hardware, options.schedule.memory_budget, "inductor")
    inputs = _inputs_on(device, options.example_inputs)
    open_strategies = candidates(Rewriter(model, inputs, {}, chosen), shape, goal, None if is_given else ranks_per_node)

    def choose() -> Choice[Prediction]:
        try:
            with phase("choosing a strategy"):
                return best_strategy(open_strategies, goal)
        except CaptureError as e:
            raise CaptureError(f"sharding_strategy='auto' calls the model with example_inputs: {e}") from e

    strategy, reason = first_ranks_choice(resolved, choose)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        resolved = resolve_mesh(None, None, device, strategy, local_world_size=ranks_per_node)
    chosen = dataclasses.replace(chosen, sharding_strategy=strategy, hardware=hardware, process_group=None)
    return resolved, chosen, reason


def _inputs_on(device: torch.device, example_inputs: Any) -> tuple[Any, ...]:
    """The arguments of a call, where the model can be traced with them."""
    inputs = (example_inputs,) if torch.is_tensor(example_inputs) else tuple(example_inputs)
    if device.type == "meta":  # it will be traced as for the CPU
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
    return off_meta(inputs, "cpu" if device.type == "meta" else device)  # type: ignore[no-any-return]


_NOT_OF_GRAPHS = (
    "process_group",
    "offload_policy",
    "example_inputs",
    "param_init_fn",
    "sync_module_states",
    "check_gradients",
)
"""Options that decide about ranks and memory, not about graphs."""


@takes(Options, without=_NOT_OF_GRAPHS, collective_lowering="packed", hardware=None)
def rewrite(
    model: nn.Module,
    *args: Any,
    world_size: WorldSize,
    device: str | torch.device = "cpu",
    **kwargs: Any,
) -> RewrittenGraphs:
    """The graphs that a rank would compile for `model(*args, **kwargs)`.

    Nothing runs: no process group, no other process, no memory is touched. Model and inputs may be on the meta device.
    The model is not changed. Options are those of `fsdp_compile`; other keyword arguments go to the model.

    Args:
        world_size: the number of ranks; a pair (replicas, ranks to shard over) for hybrid sharding; the mesh, or the
            map to meshes, that `fsdp_compile` would be given, where the model is on other dimensions as well (tensor
            and expert parallelism), as of a process group of torch's "fake" backend.
        device: "cpu" or "cuda", for which a model on the meta device is traced. On "cuda", attention takes the kernels
            of the GPU; the process has a GPU, or emulates one (`fsdp-compile emulate`).

    Raises:
        ConfigError: as `fsdp_compile`.
        CaptureError: the call cannot be traced as one graph.
    """
    kwargs = {"collective_lowering": "packed", "hardware": None, **kwargs}
    if is_auto(kwargs["hardware"]):
        raise ConfigError("hardware='auto' is what ranks run on, and rewrite has none: name the hardware")
    options = taken(Options, kwargs, _NOT_OF_GRAPHS)
    hardware = options.schedule.hardware
    if is_auto(options.collective_lowering) and hardware is None:
        raise ConfigError("collective_lowering='auto' depends on a process group: choose 'packed' or 'grouped'")
    if options.memory_budget is not None and hardware is None:
        raise ConfigError("memory_budget needs hardware= to plan for")
    if not options.is_auto:
        return rewrite_for(model, args, kwargs, options, world_size, device)
    if hardware is None:
        raise ConfigError("sharding_strategy='auto' needs hardware= to choose for")
    goal = Goal(hardware, options.schedule.memory_budget, "inductor")
    rewriter = Rewriter(model, args, kwargs, options, device)
    return best_strategy(candidates(rewriter, world_size, goal, hardware.ranks_per_node), goal).prediction.graphs
