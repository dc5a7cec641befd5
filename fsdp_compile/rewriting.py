"""Rewriting: the graphs that a rank would compile for a call, on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from .compiler.calls import generate, trace
from .compiler.traces import Trace, Traces
from .costs.hardware import Hardware
from .errors import CaptureError, ConfigError
from .graphs import RewrittenGraphs
from .layout.buckets import NO_AXIS, Axes, Axis, Layout
from .layout.precision import install_casts
from .layout.unit_meshes import find_meshes
from .module.adoption import sharded_parts
from .module.decide import decide
from .module.decision import Decision, check_dense, check_own_sizes
from .module.equal_layers import EqualLayers
from .module.layouts import layouts_of
from .module.reading import reading_copy
from .module.sharding import leeway_of, pipeline_of
from .options import Options
from .passes.metadata import Part
from .planning.step_plans import Goal, Planner
from .planning.strategies import WorldSize
from .progress import phase
from .runtime.groups import axes_of, check_mesh, part_of
from .runtime.meta import check_traced_on, off_meta, untouched

_MOST_RANKS = 2**31
_FEW = 6  # layers that are traced in place of many equal ones: the first and the last may differ, and four do not


class Rewriter:
    """Rewrites a call of a model for any strategy, number of ranks, and hardware, and traces it as seldom as it can.

    The arguments are those of `rewrite_for`; the memory of the hardware is the budget.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        device: str | torch.device = "cpu",
        layers: EqualLayers | None = None,
    ) -> None:
        self._call, self._options, self._device = (model, args, kwargs), options, device
        self._traces, self._layers = Traces(), layers

    def __call__(
        self, *, world_size: WorldSize, sharding_strategy: ShardingStrategy, hardware: Hardware | None = None
    ) -> RewrittenGraphs:
        options = dataclasses.replace(
            self._options, sharding_strategy=sharding_strategy, hardware=hardware, memory_budget=None
        )
        traces, layers = self._traces, self._layers
        return rewrite_for(*self._call, options, world_size, self._device, traces=traces, layers=layers)


def rewrite_for(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    world_size: object,
    device: str | torch.device = "cpu",
    before_compiling: Callable[[RewrittenGraphs], None] | None = None,
    traces: Traces | None = None,
    layers: EqualLayers | None = None,
) -> RewrittenGraphs:
    """The graphs of a call of the model; tensors on the meta device become tensors of `device`.

    Args:
        before_compiling: is called with the graphs, which Inductor then compiles; without it, nothing is compiled.
        traces: of this call, by these options for other strategies, ranks or hardware.
        layers: of the model. A few of them are traced, where these tell what the others would be.
    """
    check_traced_on(device, model, (args, kwargs))
    main, own_meshes = find_meshes(model, world_size, argument="world_size")
    mesh = main if isinstance(main, DeviceMesh) else None
    if own_meshes and mesh is None:
        raise ConfigError('world_size: a map to meshes has one for the model itself, too, by the name ""')
    axes = _axes_of_size(main, options.strategy) if mesh is None else _axes_of_mesh(mesh, options.strategy)
    if isinstance(model, nn.Module) and (parts := sharded_parts(model)):
        raise ConfigError(
            f"rewrite takes a model that is not sharded, and {next(iter(parts))} is: look at its `graphs`"
        )
    decision = decide(model, options, own_meshes)
    if decision.own_meshes and mesh is None:
        named = next(iter(decision.own_meshes))
        raise ConfigError(f"{named} has a mesh of its own, and world_size is no mesh: give the model one, too")
    if axes.everyone.size > 1:
        check_dense(model, set(decision.parameters.values()))
    check_own_sizes(decision, axes.shards.size)
    layouts = layouts_of(decision, axes, torch.device(device)) if axes.everyone.size > 1 else []
    reshard = decision.with_shards(axes.shards.size).values()
    sizes = [size for size in reshard if not isinstance(size, bool)]
    parts_of_size = {size: Part(size, f"shard/{size}", 0) if mesh is None else part_of(mesh, size) for size in sizes}
    schedule, names = decision.schedule, [unit.name for unit in decision.units]
    open_options = schedule, names, axes.shards.size, parts_of_size, schedule.collective_lowering != "packed"
    pipeline, plan = partial(pipeline_of, *open_options), None
    if schedule.hardware is not None:
        goal = Goal(schedule.hardware, schedule.memory_budget, "inductor")
        plan = Planner(leeway_of(*open_options), goal).plan

    def call(
        layouts: Sequence[Layout] = layouts, decision: Decision = decision
    ) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        reading = reading_copy(model, layouts, device)
        install_casts(reading, decision.precision)
        return reading, *off_meta((args, kwargs), device)

    def traced() -> Trace:
        with untouched(device):
            few = None if layers is None or len(layers) < 2 * _FEW else traced_from_few(layers)
            return trace(*call(), pipeline) if few is None else few

    def traced_from_few(layers: EqualLayers) -> Trace | None:
        with phase("tracing") as tracing:
            try:
                with layers.shortened(_FEW):
                    few = decide(model, options, own_meshes)
                    found = trace(*call(layouts_of(few, axes, torch.device(device)), few), pipeline)
            except (CaptureError, ConfigError):  # the model, or an option, names layers that are not there
                return None
            if (whole := found.lengthened(_FEW, layers.names, layouts)) is not None:
                tracing.remark = f" ({_FEW} of {len(layers)} equal layers)"
            return whole

    with phase("rewriting", of=type(model).__name__):
        if before_compiling is None:
            return (Traces() if traces is None else traces).of(layouts, traced).rewritten(pipeline, plan)
        with untouched(device):
            return generate(*call(), pipeline, plan, before_compiling)


def _axes_of_size(world_size: object, strategy: ShardingStrategy) -> Axes:
    sizes: Any = world_size if isinstance(world_size, tuple) and len(world_size) == 2 else (1, world_size)
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 < size < _MOST_RANKS for size in sizes):
        raise ConfigError(
            f"world_size is a positive int (below 2**31), a pair of them or a DeviceMesh, not {world_size!r}"
        )
    everyone = Axis(sizes[0] * sizes[1], "shard" if sizes[0] == 1 else "world")
    if strategy is ShardingStrategy.NO_SHARD:
        return Axes(NO_AXIS, everyone, everyone)
    return Axes(Axis(sizes[1], "shard"), Axis(sizes[0], "replicate") if sizes[0] > 1 else NO_AXIS, everyone)


def _axes_of_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> Axes:
    check_mesh(mesh, strategy)
    return axes_of(mesh, strategy, has_scalars=True)
