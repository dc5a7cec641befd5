"""The decision: how a model is to be sharded, before anything of it is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..layout.communication import UNCHANGED, CommunicationDtype
from ..layout.distribution import Distribution, distribution_mesh
from ..layout.precision import Precision
from ..layout.unit_meshes import OwnMesh
from ..layout.units import Unit
from ..options import Options
from ..planning.options import Reshard, ScheduleConfig
from ..runtime.comparison import Line
from ..runtime.groups import device_of, mesh_of_both, num_shards_of, resolve_mesh


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a model is to be sharded: everything that was decided, and could be refused, before anything is changed.

    Attributes:
        parameters: those to shard, by name.
        schedule: that of the options, and the hardware at hand if that is to be planned for.
        device: of the parameters when they are sharded, once the ranks are known.
        mesh: of the ranks, once it is known; None for a single one.
        is_alone: whether the user has named a mesh, or a process group, of this rank alone.
        dim_of_parameter: on which dimension each parameter is sharded, by name; without one on the first.
        own_meshes: of the parameters that are not on that mesh, by name.
        communication_of_unit: in which form a unit sends what it sends, by name.
        ranks: that hold the parts of the model, once they are known.
    """

    options: Options
    parameters: Mapping[str, nn.Parameter]
    units: list[Unit]
    precision: Precision
    schedule: ScheduleConfig
    device: torch.device | None = None
    mesh: DeviceMesh | None = None
    is_alone: bool = False
    dim_of_parameter: Mapping[str, int] = dataclasses.field(default_factory=dict)
    own_meshes: Mapping[str, OwnMesh] = dataclasses.field(default_factory=dict)
    communication_of_unit: Mapping[str, CommunicationDtype] = dataclasses.field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    def by_mesh(self) -> Iterator[tuple[DeviceMesh | None, dict[str, nn.Parameter]]]:
        """The parameters on the model's mesh, and then those on each of the others, with that."""
        yield self.mesh, {name: value for name, value in self.parameters.items() if name not in self.own_meshes}
        for mesh in dict.fromkeys(own.mesh for own in self.own_meshes.values()):
            yield mesh, {name: self.parameters[name] for name, own in self.own_meshes.items() if own.mesh == mesh}

    @property
    def inner(self) -> DeviceMesh | None:
        """What the parameters on the model's mesh were distributed over before."""
        return distribution_mesh(next(self.by_mesh())[1])

    @property
    def has_scalars(self) -> bool:
        """Whether a parameter has no dimension, so that every rank keeps it whole."""
        return any(parameter.dim() == 0 for parameter in self.parameters.values())

    def mesh_of(self, name: str) -> DeviceMesh | None:
        """Of a parameter."""
        own = self.own_meshes.get(name)
        return self.mesh if own is None else own.mesh

    def with_shards(self, num_shards: int) -> dict[str, Reshard]:
        """Whether each unit reshards after the forward, sharded over so many ranks; as `ScheduleConfig` has it."""
        found = self.schedule.reshard_of_unit([unit.name for unit in self.units], num_shards)
        for unit, value in found.items():
            if not isinstance(value, bool) and self.communication_of_unit.get(unit, UNCHANGED).gather:
                raise ConfigError(
                    f"reshard_after_forward: the unit {unit} cannot stay with {value} ranks, because "
                    "communication_dtype gathers it as integers: give it a bool"
                )
        return found

    @property
    def is_planned_by_default(self) -> bool:
        """Whether the schedule is left open, and a plan for the hardware at hand would know what else the ranks do.

        It would not among a part of the ranks, where a pipeline has several forwards under way, each of which holds
        what a plan keeps. Ranks that split the model by tensor parallelism are no such part.
        """
        num_splits = 1 if self.inner is None else self.inner.size()
        has_all_ranks = self.mesh is not None and self.mesh.size() * num_splits == dist.get_world_size()
        return self.schedule.is_at_hand and has_all_ranks

    @property
    def compute_device(self) -> torch.device:
        """Where the forward runs."""
        return compute_device(self.device or device_of(self.parameters), self.mesh)


def compute_device(device: torch.device, mesh: DeviceMesh | None) -> torch.device:
    """Where the forward runs of a model whose parameters are on `device`; on the meta device none does."""
    kind = device.type if mesh is None or mesh.device_type == "cpu" else mesh.device_type
    if kind == "meta":
        kind = "cuda" if mesh is None and torch.cuda.is_available() else "cpu"
    if kind == device.type:
        return device
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def check_distributed(decision: Decision) -> None:
    """Raise ConfigError if parameters that are distributed already cannot be sharded over the ranks of a mesh, too."""
    for name, parameter in decision.parameters.items():
        dim = decision.dim_of_parameter.get(name, 0)
        if (distribution := Distribution.of(parameter)) is not None and distribution.is_strided(dim):
            raise ConfigError(
                f"{name} is a DTensor with the placements {distribution.placements}, and is to be sharded on dimension "
                f"{dim}, too, whose parts would have no placement: have shard_placement_fn return another one"
            )
    for mesh, parameters in decision.by_mesh():
        inner = distribution_mesh(parameters)
        if inner is None or mesh is None:
            continue
        name = next(name for name, parameter in parameters.items() if isinstance(parameter, DTensor))
        try:
            mesh_of_both(mesh, inner)
        except ConfigError as e:
            raise ConfigError(f"{name} is a DTensor already: {e}") from e


def check_own_meshes(decision: Decision) -> None:
    """Raise ConfigError if a parameter cannot be on a mesh of its own, on these ranks."""
    for name, own in decision.own_meshes.items():
        is_offloaded, device = decision.options.offload.is_on, decision.device or device_of(decision.parameters)
        try:
            resolve_mesh(own.mesh, None, device, ShardingStrategy.FULL_SHARD, is_offloaded=is_offloaded)
        except ConfigError as e:
            raise ConfigError(f"{name}: {e}") from e
        if decision.mesh is None and own.mesh.size() > 1:
            raise ConfigError(f"{name} is to be sharded on {own.mesh}, and the model on a single rank")
    check_own_sizes(decision, num_shards_of(decision.mesh))


def check_own_sizes(decision: Decision, num_shards: int) -> None:
    """Raise ConfigError if a unit stays with a part of the ranks, and a parameter of it is on a mesh of its own."""
    reshard = decision.with_shards(num_shards)
    for unit in decision.units:
        named = [name for name, _ in unit.parameters if name in decision.own_meshes]
        if named and not isinstance(value := reshard.get(unit.name, True), bool):
            raise ConfigError(
                f"reshard_after_forward: the unit {unit.name} cannot stay with {value} ranks, because {named[0]} is on "
                f"{decision.own_meshes[named[0]].mesh}: give it a bool"
            )


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


def statement_of_decision(decision: Decision) -> list[Line]:
    """How a model is sharded: the options that decide about collectives, and every parameter of every unit."""
    asked = decision.options
    options = (
        asked.strategy,
        decision.schedule,
        asked.reduction,
        asked.offload,
        asked.sync_module_states,
        asked.communication,
    )
    lines = [Line(f"options: {option}") for option in options] + [Line(f"check_gradients: {asked.check_gradients}")]
    for unit in decision.units:
        for name, parameter in unit.parameters:
            policy = decision.precision.policy_of_parameter.get(name)
            parts = [
                str(tuple(parameter.shape)),
                str(parameter.dtype),
                "trained" if parameter.requires_grad else "frozen",
            ]
            parts += [] if policy is None else [str(policy)]
            dim = decision.dim_of_parameter.get(name, 0)
            parts += [f"sharded on dimension {dim}"] if dim else []
            parts += [f"distributed as {parameter.placements}"] if isinstance(parameter, DTensor) else []
            own = decision.own_meshes.get(name)
            parts += [] if own is None else [f"on a mesh of {tuple(own.mesh.shape)} ranks, {own.label}"]
            lines.append(Line(f"parameter {name} of the unit {unit.name}: {', '.join(parts)}"))
    return lines
