"""fsdp_compile, shard, rewrite: read from top to bottom, they tell the whole story."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from .backend import backend_for
from .capture import capture_only, check_options
from .config import CompileConfig, ScheduleConfig, reduction_of, refuse_unsupported
from .errors import ConfigError
from .graphs import RewrittenGraphs
from .layout import Axis, check_parameters, lay_out
from .reading import off_meta, reading_copy
from .runtime.groups import model_device, resolve_mesh
from .sharded_module import become_sharded
from .sharding import (
    check_modules,
    check_not_sharded,
    pipeline_of,
    shard_parameters,
    sharding_of,
)
from .units import find_units


def fsdp_compile(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    auto_wrap_policy: Any = "auto",
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: Any = None,
    mp_policy: None = None,
    offload_policy: None = None,
    backward_prefetch: Any = "auto",
    forward_prefetch: Any = "auto",
    collective_lowering: str = "auto",
    memory_budget: None = None,
    ignored_params: None = None,
    sync_module_states: bool = True,
    gradient_reduction: str = "mean",
    backend: str = "inductor",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """Shard `model` over the ranks and compile it, in place.

    Parameters become DTensors (`Shard(0)`) under their names; a call of the model runs compiled graphs that gather each
    unit of parameters before its use, free it after, and reduce its gradients. With a single rank nothing is sharded.

    Args:
        mesh: one dimension to shard over, or two (replicate, shard); by default all ranks. With no process group
            initialised, `WORLD_SIZE` in the environment initialises one (NCCL for CUDA, else gloo).
        process_group: the ranks to shard over, instead of a mesh.
        auto_wrap_policy: which modules are units; see `fsdp_compile.units.find_units`.
        reshard_after_forward: None frees every unit after the forward but the one used last; True frees all, False
            none; a map from globs over unit names to bool decides for the units it matches.
        backward_prefetch: "auto" (1), how many units ahead the backward gathers, or torch's BackwardPrefetch.
        forward_prefetch: "auto" (1), how many units ahead the forward gathers, or a bool.
        collective_lowering: "packed" sends a bucket as one buffer, "grouped" as one message for each parameter in one
            call, without copies; "auto" is grouped on NCCL and packed elsewhere.
        sync_module_states: give every rank the parameters and buffers of the first.
        gradient_reduction: "mean" or "sum" over the ranks.
        backend: "inductor", or "aot_eager" for the same graphs without code generation.
        fullgraph, dynamic, options: passed on to torch.compile and Inductor.
        sharding_strategy, mp_policy, offload_policy, memory_budget, ignored_params: refused unless left alone.

    Returns:
        The same object. `model.graphs` lists the rewritten graphs compiled so far.

    Raises:
        ConfigError: an argument or the model asks for something that is not supported; the model is untouched.
    """
    config = CompileConfig(backend, fullgraph, dynamic, options)
    check_options(options)
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
        ignored_params=ignored_params,
        sync_module_states=sync_module_states,
        gradient_reduction=gradient_reduction,
    )

    def compile_(sharded: nn.Module) -> None:
        sharded.compile(backend=backend_for(sharding_of(sharded), config), fullgraph=fullgraph, dynamic=dynamic)

    sharding_of(model).compile = compile_
    compile_(model)
    return model


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    auto_wrap_policy: Any = "auto",
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: Any = None,
    mp_policy: None = None,
    offload_policy: None = None,
    backward_prefetch: Any = "auto",
    forward_prefetch: Any = "auto",
    collective_lowering: str = "auto",
    memory_budget: None = None,
    ignored_params: None = None,
    sync_module_states: bool = True,
    gradient_reduction: str = "mean",
) -> nn.Module:
    """Shard `model` in place, without compiling it: it runs in eager, one parameter gathered at a time.

    `torch.compile(model, backend="fsdp")` compiles it to the graphs that `fsdp_compile` makes. The arguments are those
    of `fsdp_compile`; the ones about the schedule take effect when the model is compiled.
    """
    schedule = ScheduleConfig.of(reshard_after_forward, forward_prefetch, backward_prefetch, collective_lowering)
    reduction = reduction_of(gradient_reduction)
    refuse_unsupported(sharding_strategy, mp_policy, offload_policy, memory_budget, ignored_params)
    _check_model(model)
    units = find_units(model, auto_wrap_policy)
    schedule.check_globs([unit.name for unit in units])
    device = model_device(model)
    if mesh is None and process_group is None:
        _initialise_from_environment(device)
    resolved = resolve_mesh(mesh, process_group, device)
    shard_parameters(model, units, resolved, schedule, reduction=reduction, sync_module_states=sync_module_states)
    become_sharded(model)
    return model


def rewrite(
    model: nn.Module,
    *args: Any,
    world_size: int,
    auto_wrap_policy: Any = "auto",
    reshard_after_forward: Any = None,
    backward_prefetch: Any = "auto",
    forward_prefetch: Any = "auto",
    collective_lowering: str = "packed",
    gradient_reduction: str = "mean",
    **kwargs: Any,
) -> RewrittenGraphs:
    """The graphs that a rank of `world_size` would compile for `model(*args, **kwargs)`.

    Nothing runs: no process group, no other process, no memory is touched. Model and inputs may be on the meta device,
    and are then traced as for the CPU. The model is not changed. Options are those of `fsdp_compile`; other keyword
    arguments go to the model.

    Raises:
        ConfigError: as `fsdp_compile`.
        CaptureError: the call cannot be traced as one graph.
    """
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size is a positive int, not {world_size!r}")
    if collective_lowering == "auto":
        raise ConfigError("collective_lowering='auto' depends on a process group: choose 'packed' or 'grouped'")
    schedule = ScheduleConfig.of(reshard_after_forward, forward_prefetch, backward_prefetch, collective_lowering)
    reduction = reduction_of(gradient_reduction)
    _check_model(model)
    units = find_units(model, auto_wrap_policy)
    names = [unit.name for unit in units]
    schedule.check_globs(names)
    shards = Axis(world_size, "shard")
    layouts = lay_out(units, shards, Axis(1, ""), shards, reduction) if world_size > 1 else []
    reading = reading_copy(model, layouts)
    grouped = collective_lowering == "grouped"
    args, kwargs = off_meta((args, kwargs))
    return capture_only(reading, args, kwargs, pipeline_of(schedule, names, grouped=grouped))


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is an nn.Module, not {type(model).__name__}")
    check_not_sharded(model)
    check_parameters(model)
    check_modules(model)


def _initialise_from_environment(device: torch.device) -> None:
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        on_cuda = device.type == "cuda" or (device.type == "meta" and torch.cuda.is_available())
        dist.init_process_group("nccl" if on_cuda else "gloo")
