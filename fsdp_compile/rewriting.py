"""Rewriting: the graphs that a rank would compile for a call, on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from .compiler.calls import generate
from .compiler.traces import Trace, Traces
from .costs.hardware import Hardware
from .errors import ConfigError
from .graphs import RewrittenGraphs
from .layout.buckets import NO_AXIS, Axes, Axis
from .layout.unit_meshes import find_meshes
from .module.adoption import sharded_parts
from .module.decide import decide
from .module.decision import check_dense, check_own_sizes
from .module.equal_layers import EqualLayers
from .module.layouts import layouts_of
from .module.sharding import leeway_of, pipeline_of
from .options import Options
from .passes.metadata import Part
from .planning.step_plans import Goal, Planner
from .planning.strategies import WorldSize
from .progress import phase
from .runtime.groups import axes_of, check_mesh, part_of
from .runtime.meta import check_traced_on, untouched
from .traced_call import Decided, TracedCall

_MOST_RANKS = 2**31


@dataclasses.dataclass(frozen=True)
class Economy:
    """What spares time where a call is rewritten often, or its graphs are only looked at.

    Attributes:
        traces: of this call, by these options for other strategies, ranks or hardware.
        layers: of the model. A few of them are traced, where these tell what the others would be.
        lowers: whether graphs are lowered, and verified after every pass; otherwise they are verified in the end.
    """

    traces: Traces = dataclasses.field(default_factory=Traces)
    layers: EqualLayers | None = None
    lowers: bool = True


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
        economy: Economy | None = None,
    ) -> None:
        self._call, self._options, self._device = (model, args, kwargs), options, device
        self._economy = economy or Economy()

    def __call__(
        self, *, world_size: WorldSize, sharding_strategy: ShardingStrategy, hardware: Hardware | None = None
    ) -> RewrittenGraphs:
        options = self._options_of(sharding_strategy, hardware)
        return rewrite_for(*self._call, options, world_size, self._device, economy=self._economy)

    def shard_bytes(self, *, world_size: WorldSize, sharding_strategy: ShardingStrategy) -> tuple[int, int]:
        """Bytes of what a rank keeps of all parameters, and of those that are trained."""
        model, *_ = self._call
        sharding = _Sharding.of(model, self._options_of(sharding_strategy), world_size, self._device)
        sizes = [(layout.numel * layout.dtype.itemsize, layout.requires_grad) for layout in sharding.decided[1]]
        return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)

    def _options_of(self, strategy: ShardingStrategy, hardware: Hardware | None = None) -> Options:
        return dataclasses.replace(self._options, sharding_strategy=strategy, hardware=hardware, memory_budget=None)


@dataclasses.dataclass(frozen=True)
class _Sharding:
    """How a model is sharded over ranks.

    Attributes:
        mesh: of the ranks; None where only their number is known.
        decide: makes `decided`, anew for other tensors of the model.
    """

    mesh: DeviceMesh | None
    axes: Axes
    decide: Callable[[], Decided]
    decided: Decided

    @classmethod
    def of(cls, model: nn.Module, options: Options, world_size: object, device: str | torch.device) -> _Sharding:
        main, own_meshes = find_meshes(model, world_size, argument="world_size")
        mesh = main if isinstance(main, DeviceMesh) else None
        if own_meshes and mesh is None:
            raise ConfigError('world_size: a map to meshes has one for the model itself, too, by the name ""')
        axes = _axes_of_size(main, options.strategy) if mesh is None else _axes_of_mesh(mesh, options.strategy)
        if isinstance(model, nn.Module) and (parts := sharded_parts(model)):
            raise ConfigError(
                f"rewrite takes a model that is not sharded, and {next(iter(parts))} is: look at its `graphs`"
            )

        def make() -> Decided:
            decision = decide(model, options, own_meshes)
            return decision, layouts_of(decision, axes, torch.device(device)) if axes.everyone.size > 1 else []

        decision, layouts = make()
        if decision.own_meshes and mesh is None:
            named = next(iter(decision.own_meshes))
            raise ConfigError(f"{named} has a mesh of its own, and world_size is no mesh: give the model one, too")
        if axes.everyone.size > 1:
            check_dense(model, set(decision.parameters.values()))
        check_own_sizes(decision, axes.shards.size)
        return cls(mesh, axes, make, (decision, layouts))


def rewrite_for(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    world_size: object,
    device: str | torch.device = "cpu",
    before_compiling: Callable[[RewrittenGraphs], None] | None = None,
    economy: Economy | None = None,
) -> RewrittenGraphs:
    """The graphs of a call of the model; tensors on the meta device become tensors of `device`.

    Args:
        before_compiling: is called with the graphs, which Inductor then compiles; without it, nothing is compiled.
    """
    economy = economy or Economy()
    check_traced_on(device, model, (args, kwargs))
    sharding = _Sharding.of(model, options, world_size, device)
    mesh, axes, (decision, layouts) = sharding.mesh, sharding.axes, sharding.decided
    reshard = decision.with_shards(axes.shards.size).values()
    sizes = [size for size in reshard if not isinstance(size, bool)]
    parts_of_size = {size: Part(size, f"shard/{size}", 0) if mesh is None else part_of(mesh, size) for size in sizes}
    schedule, names = decision.schedule, [unit.name for unit in decision.units]
    open_options = schedule, names, axes.shards.size, parts_of_size, schedule.collective_lowering != "packed"
    pipeline, plan = partial(pipeline_of, *open_options), None
    if schedule.hardware is not None:
        goal = Goal(schedule.hardware, schedule.memory_budget, "inductor")
        plan = Planner(leeway_of(*open_options), goal).plan
    call = TracedCall(model, args, kwargs, device, sharding.decide, pipeline)

    def traced() -> Trace:
        found = call.trace_few(economy.layers, layouts)
        return call.trace((decision, layouts)) if found is None else found

    with phase("rewriting", of=type(model).__name__):
        if before_compiling is None:
            return economy.traces.of(layouts, traced).rewritten(pipeline, plan, lowers=economy.lowers)
        with untouched(device):
            return generate(*call.reading((decision, layouts)), pipeline, plan, before_compiling)


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
