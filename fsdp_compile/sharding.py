"""Sharding: the parameters of a module become DTensor views into flat shards, one shard for each bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .config import ScheduleConfig
from .errors import ConfigError
from .graphs import RewrittenGraphs
from .layout import Axis, Layout, lay_out
from .passes.pipeline import Pipeline
from .reading import Read, Running, install_reads
from .runtime.flat_shard import FlatShard
from .runtime.gradients import carry_hooks
from .runtime.groups import axes_of, is_nccl, whole_mesh
from .runtime.optimizers import note_replacement
from .units import Unit


@dataclasses.dataclass(eq=False)
class Sharding:
    """What a sharded model knows: its shards, its schedule options, the graphs compiled so far.

    With a single rank `mesh` is None and there are no shards: the parameters are the model's own. `compile` is how the
    model was compiled, if it was.
    """

    mesh: DeviceMesh | None
    units: list[str]
    shards: list[FlatShard]
    schedule: ScheduleConfig
    running: Running = dataclasses.field(default_factory=Running)
    graphs: list[RewrittenGraphs] = dataclasses.field(default_factory=list)
    compile: Callable[[Any], None] | None = None

    def pipeline(self) -> Pipeline:
        """The passes that this model's graphs run through."""
        lowering = self.schedule.collective_lowering
        is_auto_grouped = lowering == "auto" and self.mesh is not None and is_nccl(self.mesh)
        return pipeline_of(self.schedule, self.units, grouped=lowering == "grouped" or is_auto_grouped)

    def check(self) -> None:
        """Before a forward: parameters that were moved are views of their shards again."""
        for shard in self.shards:
            shard.check_views()


def pipeline_of(schedule: ScheduleConfig, units: list[str], *, grouped: bool) -> Pipeline:
    return Pipeline.of(
        reshard=schedule.reshard_of_unit(units),
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=schedule.backward_prefetch,
        grouped=grouped,
    )


def sharding_of(model: nn.Module) -> Sharding:
    found: Sharding = vars(model)["_fsdp_sharding"]
    return found


def is_sharded(module: nn.Module) -> bool:
    return "_fsdp_sharding" in vars(module)


def check_not_sharded(model: nn.Module) -> None:
    """Raise ConfigError if the model, or a part of it, is sharded already."""
    for name, module in model.named_modules():
        if is_sharded(module):
            raise ConfigError(f"{name or 'the model'} is sharded already")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, torch.distributed.tensor.DTensor):
            raise ConfigError(f"{name} is a DTensor already; FSDP shards plain parameters")


def check_modules(model: nn.Module) -> None:
    """Raise ConfigError for modules that sharding would break in silence.

    These are modules that write to their parameters in forward, and modules that keep parameters in attributes besides,
    where they would go on holding the old ones.
    """
    parameters = set(model.parameters())
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"{name or 'the model'} ({type(module).__name__}) has max_norm, with which its forward writes to its "
                "weight, which is sharded: normalise the weight outside of forward"
            )
        for attribute, value in vars(module).items():
            held = value if isinstance(value, (list, tuple)) else [value]
            if attribute != "_parameters" and any(
                isinstance(item, nn.Parameter) and item in parameters for item in held
            ):
                raise ConfigError(
                    f"{name or 'the model'} ({type(module).__name__}) also keeps parameters in its attribute "
                    f"{attribute!r}, which sharding cannot replace; such modules are not supported"
                )


def shard_parameters(
    model: nn.Module,
    units: list[Unit],
    mesh: DeviceMesh | None,
    schedule: ScheduleConfig,
    *,
    reduction: str,
    sync_module_states: bool,
) -> Sharding:
    """Shard the parameters of `model`, in place. Everything that can be refused has been refused before."""
    sharding = Sharding(mesh, [unit.name for unit in units], [], schedule)
    if mesh is not None:
        if sync_module_states:
            _broadcast(model, mesh)
        layouts = _layouts(units, mesh, reduction)
        sharding.shards = _replace_parameters(model, layouts, mesh, sharding.running)
    vars(model)["_fsdp_sharding"] = sharding
    note_sharding(model, sharding)
    return sharding


def note_sharding(model: nn.Module, sharding: Sharding) -> None:
    """Tell the tensors that graphs take which sharding they belong to: shards, or the parameters of a single rank."""
    for shard in sharding.shards:
        shard.sharding = sharding
    if sharding.mesh is None:
        for parameter in model.parameters():
            parameter.fsdp_sharding = sharding  # type: ignore[attr-defined]


def _layouts(units: list[Unit], mesh: DeviceMesh, reduction: str) -> list[Layout]:
    shards, replicas = axes_of(mesh)
    has_scalars = any(parameter.dim() == 0 for unit in units for _, parameter in unit.parameters)
    everyone = whole_mesh(mesh) if has_scalars else Axis(mesh.size(), "")
    return lay_out(units, shards, replicas, everyone, reduction)


def _broadcast(model: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters and buffers of the mesh's first rank, to all."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            data = tensor.detach().contiguous()
            for dim in reversed(range(mesh.ndim)):  # along the rows of the first column's ranks, then from row to row
                group = mesh.get_group(dim)
                dist.broadcast(data, src=dist.get_global_rank(group, 0), group=group)
            tensor.detach().copy_(data)


def _replace_parameters(model: nn.Module, layouts: list[Layout], mesh: DeviceMesh, running: Running) -> list[FlatShard]:
    original_of_name = dict(model.named_parameters())
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, name))
    read_of_parameter = {}
    sharded_of_original = {}
    shards = []
    for layout in layouts:
        originals = [original_of_name[slot.parameter] for slot in layout.slots]
        first_owners = [owners[original][0] for original in originals]
        shard = FlatShard.create(layout, [original.detach() for original in originals], first_owners, mesh)
        shards.append(shard)
        for slot, original, parameter in zip(layout.slots, originals, shard.parameters, strict=True):
            read_of_parameter[original] = Read(shard, layout.unshard_arguments(slot))
            sharded_of_original[original] = parameter
    install_reads(model, read_of_parameter, running)
    for original, sharded in sharded_of_original.items():
        for module, name in owners[original]:
            module._parameters[name] = sharded
        carry_hooks(original, sharded)
        note_replacement(original, sharded)
    return shards
