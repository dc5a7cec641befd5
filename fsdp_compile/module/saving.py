"""torch.save(model) and torch.load: each rank's part of a sharded model, in a file of its own.

Process groups do not pickle, nor does what names them. So a model is saved as the modules that the user wrote, without
what sharding added to them, and the shards; loading makes the mesh anew and puts both together again.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from ..errors import ConfigError
from ..layout.buckets import NO_AXIS, Axis, Layout
from ..runtime.flat_shard import FlatShard
from ..runtime.groups import axes_of, mesh_over, part_of
from ..runtime.holders import holders_over, ranks_of_holders
from ..runtime.ranks import nested_ranks
from ..runtime.reads import Read
from .own_units import OwnUnits
from .reading import install_reads, local_reads, original_class
from .replacement import owners_of_parameters
from .sharding import Sharding, note_sharding, sharding_of

_MADE_ANEW = {
    "mesh",
    "holders",
    "shards",
    "parts",
    "running",
    "is_finishing",
    "is_checking",
    "made",
    "compilations",
    "looked",
    "watched",
    "is_summoned",
    "owns",
    "schedules",
    "post_optim_event",
    "updates",
}  # not saved of a Sharding
_INSTEAD = (
    "a file of torch.save(model) is for the rank and the number of ranks that it was saved on; "
    "torch.distributed.checkpoint saves and loads state_dicts on any"
)


@dataclasses.dataclass(frozen=True)
class MeshPosition:
    """Where a rank was when it saved its part of a model.

    Attributes:
        ranks: of the mesh, nested as its dimensions are; None for a model that is not sharded over several ranks.
        dim_names, device_type: of the mesh.
    """

    rank: int
    world_size: int
    ranks: list[Any] | None = None
    dim_names: tuple[str, ...] | None = None
    device_type: str = "cpu"

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> MeshPosition:
        here = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if mesh is None:
            return cls(*here)
        return cls(*here, nested_ranks(mesh), mesh.mesh_dim_names, mesh.device_type)

    def check(self) -> None:
        """Raise ConfigError on another rank, or among another number of them."""
        now = MeshPosition.of(None)
        if (now.rank, now.world_size) != (self.rank, self.world_size):
            raise ConfigError(
                f"the model was saved by rank {self.rank} of {self.world_size}, and is loaded on rank {now.rank} of "
                f"{now.world_size}: {_INSTEAD}"
            )

    def mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh over the same ranks; every rank of it loads at the same time."""
        return None if self.ranks is None else mesh_over(self.ranks, device_type, self.dim_names)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A rank's part of a sharded model, except for its tensors.

    Attributes:
        part_sizes: the keys of `Sharding.parts`.
        shards: without the values.
        modules: pickled; the model, the fields of its `Sharding`, how a single rank reads its parameters.
    """

    place: MeshPosition
    part_sizes: list[int]
    shards: list[SavedShard]
    modules: bytes

    def device_type(self, flats: list[torch.Tensor]) -> str:
        """Of the mesh: where the shards are now, if they were on the mesh's device before (`map_location` moves)."""
        if flats and all(shard.layout.device.type == self.place.device_type for shard in self.shards):
            return flats[0].device.type
        return self.place.device_type


@dataclasses.dataclass(frozen=True)
class SavedShard:
    """A shard without its values.

    Attributes:
        layout: with the roles of its axes in the place of the names of their process groups.
        requires_grad: of each parameter.
    """

    layout: Layout
    requires_grad: list[bool]
    is_pinned: bool

    @classmethod
    def of(cls, shard: FlatShard) -> SavedShard:
        requires_grad = [parameter.requires_grad for parameter in shard.parameters]
        return cls(_with_roles(shard.layout, shard.mesh), requires_grad, shard.data.is_pinned())

    def around(self, flat: torch.Tensor, mesh: DeviceMesh) -> FlatShard:
        """The shard with the values in `flat`."""
        layout = dataclasses.replace(_with_groups(self.layout, mesh), device=flat.device)
        flat = flat.pin_memory() if self.is_pinned and torch.cuda.is_available() else flat
        shard = FlatShard.around(flat, layout, [], mesh)
        for parameter, requires_grad in zip(shard.parameters, self.requires_grad, strict=True):
            parameter.requires_grad_(requires_grad)
        return shard


def save(model: nn.Module, protocol: int) -> tuple[Saved, list[torch.Tensor], list[torch.Tensor]]:
    """What `load` takes: the model, the shards, all other tensors. Tensors apart, so that torch.save sees them."""
    sharding = sharding_of(model)
    sharding.refuse_if_summoned("pickling the model")
    if others := sharding.meshes() - {sharding.mesh}:
        raise ConfigError(
            f"a model with parameters on {', '.join(map(str, others))} besides the mesh that it is sharded over cannot "
            "be pickled: save its state_dict by torch.distributed.checkpoint"
        )
    if any(slot.read_as for shard in sharding.shards for slot in shard.layout.slots):
        raise ConfigError(
            "a model whose forward reads DTensors (dp_mesh_dims) cannot be pickled: save its state_dict by "
            "torch.distributed.checkpoint"
        )
    sharding.check()
    sharding.refuse_newcomers(model)  # loaded, they would pass for parameters that were left as they are
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol, model)
    state = {field.name: getattr(sharding, field.name) for field in dataclasses.fields(sharding)}
    state = {name: value for name, value in state.items() if name not in _MADE_ANEW}
    state["schedule"] = sharding.schedule.without_updates()  # nothing steps in the backward of a copy
    owns = [_saved_own(own, sharding) for own in sharding.owns]
    pickler.dump((model, state, local_reads(model), owns, *_taken_out(model)))
    shards = [SavedShard.of(shard) for shard in sharding.shards]
    saved = Saved(MeshPosition.of(sharding.mesh), list(sharding.parts), shards, buffer.getvalue())
    return saved, [shard.data.detach() for shard in sharding.shards], pickler.tensors


def _saved_own(own: OwnUnits, sharding: Sharding) -> tuple[Any, ...]:
    """What `OwnUnits` takes, with the numbers of shards and the parameters of divisors in their places."""
    shards = [sharding.shards.index(shard) for shard in own.shards]
    divided = [parameter for parameter, divisor in sharding.divisors.items() if divisor in own.divisors]
    rest = own.reduction, own.sums, own.reductions, own.full_in_evaluation
    return own.modules, own.names, shards, divided, *rest


def load(saved: Saved, flats: list[torch.Tensor], tensors: list[torch.Tensor]) -> tuple[nn.Module, list[OwnUnits]]:
    """The model with its parameters sharded, which has yet to become a sharded module, and its units by their calls.

    Raises:
        ConfigError: this is another rank, or another number of ranks, than the model was saved on.
    """
    saved.place.check()
    mesh = saved.place.mesh(saved.device_type(flats))
    shards, parts = [], {}
    if mesh is not None:
        shards = [shard.around(flat, mesh) for shard, flat in zip(saved.shards, flats, strict=True)]
        parts = {size: part_of(mesh, size) for size in saved.part_sizes}
    model, state, local_reads, owns, *taken_out = _Unpickler(io.BytesIO(saved.modules), mesh, shards, tensors).load()
    holders = holders_over(ranks_of_holders(mesh, None, {}), mesh)
    sharding = Sharding(mesh=mesh, holders=holders, shards=shards, parts=parts, **state)
    install_reads(model, dict(local_reads) | _reads([model, *taken_out], shards), sharding.running)
    vars(model)["_fsdp_sharding"] = sharding
    note_sharding(model, sharding)
    return model, [
        OwnUnits(modules, names, [shards[i] for i in indices], [sharding.divisors[each] for each in divided], *rest)
        for modules, names, indices, divided, *rest in owns
    ]


def _taken_out(model: nn.Module) -> list[nn.Module]:
    """The modules with sharded parameters that are no longer in the model: their part of the shards is still there."""
    owners = (owner for shard in sharding_of(model).shards for owner, _ in shard.owners)
    held = set(model.modules())
    return list(dict.fromkeys(owner for owner in owners if owner not in held))


def _reads(modules: list[nn.Module], shards: list[FlatShard]) -> dict[nn.Parameter, Read]:
    """How the modules, which hold the parameters of the shards already, are to read them."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        owners |= owners_of_parameters(module)
    reads = {}
    for shard in shards:
        for slot, parameter in zip(shard.layout.slots, shard.parameters, strict=True):
            if parameter not in owners:
                raise ConfigError(f"{slot.parameter} was not saved: the model's class decides itself what is pickled")
            shard.owners.append(owners[parameter][0])
            read = Read.of(shard, shard.layout, slot, is_frozen=not parameter.requires_grad)
            shard.reads.append(read)
            reads[parameter] = read
    return reads


class _Pickler(pickle.Pickler):
    """Pickles modules as those of the classes that the user wrote, and puts tensors aside."""

    def __init__(self, file: io.BytesIO, protocol: int, model: nn.Module) -> None:
        super().__init__(file, max(2, protocol))  # persistent ids of lower ones are text
        self.protocol, self.model = max(2, protocol), model
        self.tensors: list[torch.Tensor] = []
        self.mesh = sharding_of(model).mesh
        self.names: dict[torch.Tensor, tuple[Any, ...]] = {}
        for i, shard in enumerate(sharding_of(model).shards):
            self.names |= {parameter: ("parameter", i, j) for j, parameter in enumerate(shard.parameters)}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, DeviceMesh) and value == self.mesh:
            return ("mesh",)
        if not isinstance(value, torch.Tensor):
            return None
        if value not in self.names:
            self.names[value] = ("tensor", len(self.tensors))
            self.tensors.append(value)
        return self.names[value]

    def reducer_override(self, value: Any) -> Any:
        cls = type(value)
        written = original_class(cls)
        is_another_root = "_fsdp_sharding" in getattr(value, "__dict__", ()) and value is not self.model
        if written is cls or is_another_root:
            return NotImplemented
        reduce: Any = written.__reduce_ex__
        function, arguments, *rest = reduce(value, self.protocol)
        arguments = (function, *[written if argument is cls else argument for argument in arguments])
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: item for name, item in rest[0].items() if not name.startswith("_fsdp_")}
        return _call, arguments, *rest


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """pickle does not let a reducer that it knows by name, such as `copyreg.__newobj__`, make another class."""
    return function(*arguments)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: io.BytesIO, mesh: DeviceMesh | None, shards: list[FlatShard], tensors: list[torch.Tensor]
    ) -> None:
        super().__init__(file)
        self.mesh, self.shards, self.tensors = mesh, shards, tensors

    def persistent_load(self, name: Any) -> Any:
        kind, *indices = name
        if kind == "mesh":
            return self.mesh
        if kind == "tensor":
            return self.tensors[indices[0]]
        return self.shards[indices[0]].parameters[indices[1]]


def _with_roles(layout: Layout, mesh: DeviceMesh) -> Layout:
    """The layout with the roles of its axes in the mesh in the place of the names of their process groups."""
    axes = axes_of(mesh, ShardingStrategy.FULL_SHARD, has_scalars=False)
    roles = {axes.replicas.group: "replicate", axes.shards.group: "shard"}

    def role(axis: Axis) -> Axis:
        if axis.size == 1:
            return NO_AXIS
        if axis.group not in roles and axis.size != mesh.size():
            raise ConfigError(f"{layout.bucket} is sharded over {axis.size} ranks that are no axis of its mesh")
        return Axis(axis.size, roles.get(axis.group, "everyone"))

    return _with_axes(layout, role)


def _with_groups(layout: Layout, mesh: DeviceMesh) -> Layout:
    """The inverse of `_with_roles`."""
    is_everyone = "everyone" in (layout.shards.group, layout.replicas.group)
    axes = axes_of(mesh, ShardingStrategy.FULL_SHARD, has_scalars=is_everyone)
    axis_of_role = {"shard": axes.shards, "replicate": axes.replicas, "everyone": axes.everyone}
    return _with_axes(layout, lambda axis: axis_of_role.get(axis.group, axis))


def _with_axes(layout: Layout, change: Callable[[Axis], Axis]) -> Layout:
    return dataclasses.replace(layout, shards=change(layout.shards), replicas=change(layout.replicas))
