"""Replacement: the parameters of a module become DTensor views into flat shards, one shard for each bucket."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..layout.distribution import distribution_mesh, local_part
from ..layout.options import OffloadConfig
from ..layout.precision import install_casts
from ..runtime.flat_shard import Divisor, FlatShard
from ..runtime.gradients import carry_hooks
from ..runtime.groups import axes_of, num_shards_of, part_of
from ..runtime.optimizers import note_replacement
from ..runtime.reads import LocalRead, Read
from ..runtime.recomputation import checkpoint_in_forward
from .decision import Decision
from .layouts import layouts_of
from .own_units import OwnUnits
from .reading import Running, install_reads
from .sharding import Sharding


def shard_parameters(model: nn.Module, decision: Decision) -> Sharding:
    """Shard the parameters of `model`, in place. Everything that can be refused has been refused before."""
    sharding = Sharding(
        mesh=decision.mesh,
        units=[unit.name for unit in decision.units],
        schedule=decision.schedule,
        is_alone=decision.is_alone,
        checks_gradients=decision.options.check_gradients,
    )
    if decision.mesh is None:
        _move_buffers(model, decision.device)
        _keep_whole(model, decision, sharding.running)
        sharding.whole = {name: (unit.name, value) for unit in decision.units for name, value in unit.parameters}
        for name in sharding.whole:
            owner, _, attribute = name.rpartition(".")
            sharding.owners_of_whole[name] = model.get_submodule(owner), attribute
        divisor = decision.options.reduction.divisor
        sharding.divisors = {parameter: Divisor(divisor) for _, parameter in sharding.whole.values()}
    else:
        _move_buffers(model, decision.compute_device)
        reshard = decision.with_shards(num_shards_of(decision.mesh)).values()
        for size in sorted({value for value in reshard if not isinstance(value, bool)}):
            sharding.parts[size] = part_of(decision.mesh, size)
        _replace_parameters(model, decision, decision.mesh, sharding)
    install_casts(model, decision.precision)
    checkpoint_in_forward(model)
    own = OwnUnits(
        (model,), list(sharding.units), [*sharding.shards], [*sharding.divisors.values()], decision.options.reduction
    )
    own.note()
    sharding.owns.append(own)
    vars(model)["_fsdp_sharding"] = sharding
    return sharding


def _move_buffers(model: nn.Module, device: torch.device | None) -> None:
    """To where the forward runs, if that is known, from the CPU's memory; parameters go there as they are sharded."""
    if device is None or device.type in ("cpu", "meta"):
        return
    moved = {buffer: buffer.to(device) for buffer in model.buffers() if buffer.device.type == "cpu"}
    for module in model.modules():
        module._buffers.update({name: moved[held] for name, held in module._buffers.items() if held in moved})


def _keep_whole(model: nn.Module, decision: Decision, running: Running) -> None:
    """On a single rank parameters stay as they are; a forward may read them in another dtype, on another device."""
    compute_device = decision.compute_device if decision.options.offload.is_on else None
    if compute_device is None:
        for parameter in decision.parameters.values():
            if (device := _device_of_shard(parameter.device, decision)) != parameter.device:
                parameter.data = parameter.data.to(device)
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
    axes = axes_of(mesh, decision.options.strategy, has_scalars=decision.has_scalars)
    for layout in layouts_of(decision, axes, decision.compute_device):
        originals = [decision.parameters[slot.parameter] for slot in layout.slots]
        first_owners = [owners[original][0] for original in originals]
        tensors = [values.of(original, *owner) for original, owner in zip(originals, first_owners, strict=True)]
        layout = dataclasses.replace(layout, device=_device_of_shard(tensors[0].device, decision))
        is_pinned = decision.options.offload.pin_memory and torch.cuda.is_available() and layout.device.type == "cpu"
        held_on = decision.mesh_of(layout.slots[0].parameter) or mesh
        shard = FlatShard.create(layout, tensors, first_owners, held_on, pin_memory=is_pinned)
        sharding.shards.append(shard)
        for index, (slot, original) in enumerate(zip(layout.slots, originals, strict=True)):
            read = Read.of(shard, layout, slot, is_frozen=not layout.requires_grad)
            shard.reads.append(read)
            read_of_parameter[original], sharded_of_original[original] = read, shard.parameters[index]
    install_reads(model, read_of_parameter, sharding.running)
    for original, sharded in sharded_of_original.items():
        for module, name in owners[original]:
            module._parameters[name] = sharded
        carry_hooks(original, sharded)
        note_replacement(original, sharded, read_of_parameter[original])


def _device_of_shard(device: torch.device, decision: Decision) -> torch.device:
    """Where the shard of a value belongs that is on `device`; on the meta device until it has memory."""
    if device.type == "meta":
        return device
    if decision.options.offload.is_on:
        return torch.device("cpu")
    return decision.compute_device if device.type == "cpu" else device


class _Values:
    """The full values of parameters, one after another: given memory where they have none, and synchronised."""

    def __init__(self, decision: Decision, mesh: DeviceMesh) -> None:
        self.decision = decision
        self.on_mesh = mesh, decision.inner
        self.on_mesh_of = {
            parameter: (own_mesh or mesh, distribution_mesh(together))
            for own_mesh, together in decision.by_mesh()
            for parameter in together.values()
        }
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
            self.broadcast([value], self.on_mesh_of[original])
        return value

    def broadcast(
        self, tensors: Iterable[torch.Tensor | None], on: tuple[DeviceMesh, DeviceMesh | None] | None = None
    ) -> None:
        """The values of the mesh's first rank, to all; of what is distributed, from the first with the same part.

        Args:
            on: a mesh, and what parameters on it were distributed over before; without it, the model's.
        """
        for tensor in tensors:
            if tensor is not None and not tensor.is_meta:
                held = local_part(tensor)
                data = held.to(self.decision.compute_device if held.device.type == "cpu" else held.device).contiguous()
                for group in _groups_with_same(tensor, *(on or self.on_mesh)):
                    dist.broadcast(data, src=dist.get_global_rank(group, 0), group=group)
                held.copy_(data)


def _groups_with_same(tensor: torch.Tensor, mesh: DeviceMesh, inner: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """This rank's groups whose ranks hold the same part: along the first row of a mesh, then from row to row."""
    groups = [mesh.get_group(dim) for dim in reversed(range(mesh.ndim))]
    for dim in reversed(range(0 if inner is None else inner.ndim)):
        if not isinstance(tensor, DTensor) or tensor.placements[dim].is_replicate():
            groups.append(inner.get_group(dim))  # type: ignore[union-attr]
    return groups


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
