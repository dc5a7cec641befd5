"""Adoption: a model whose parts were sharded before it takes them over, with their units and options.

So models can be sharded from the bottom up, one module after another, and run as one program in the end.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigError
from ..layout.buckets import Layout
from ..layout.distribution import distribution_mesh
from ..passes import ops
from ..passes.plan import PrefetchList
from ..runtime.flat_shard import FlatShard
from ..runtime.groups import num_shards_of
from ..runtime.holders import Holders, holders_over, ranks_of_holders
from ..runtime.optimizers import replacement_of
from ..runtime.ranks import all_ranks, nested_ranks
from .decision import Decision
from .reading import install_reads
from .sharded_module import become_part
from .sharding import Sharding, is_sharded, sharding_of


def sharded_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules below `model` that are sharded, by name.

    Raises:
        ConfigError: the model itself is sharded, or a part of it together with a module that is not in the model.
    """
    if is_sharded(model):
        raise ConfigError("the model is sharded already: call it as it is, or shard a new one")
    parts = {name: module for name, module in model.named_modules() if is_sharded(module)}
    held = set(parts.values())
    for name, part in parts.items():
        if missing := [other for other in sharding_of(part).together if other not in held]:
            raise ConfigError(
                f"{name} was sharded together with a {type(missing[0]).__name__} that is not in the model: shard a "
                "module that holds both"
            )
    return parts


def adopted_parameters(model: nn.Module, parts: Mapping[str, nn.Module]) -> set[nn.Parameter]:
    """The parameters that the parts hold, and those that were shared with a module before that was sharded."""
    shared = {parameter for parameter in model.parameters() if replacement_of(parameter) is not None}
    return {parameter for part in parts.values() for parameter in part.parameters()} | shared


def sharded_around(model: nn.Module, parts: Mapping[str, nn.Module]) -> set[str]:
    """The names of parameters of modules, none of the parts', that were sharded with a module around `model`."""
    inside = {module for part in parts.values() for module in part.modules()}
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and module not in inside and _is_sharded(module, name, parameter)
    }


def _is_sharded(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter of this module is one of a sharding, on several ranks or on a single one."""
    return name in vars(module).get("_fsdp_reads", {}) or getattr(parameter, "fsdp_sharding", None) is not None


def common_mesh(parts: Mapping[str, nn.Module]) -> DeviceMesh | None:
    """The mesh of the parts; of several, the one that has the ranks of all.

    Raises:
        ConfigError: none of them does.
    """
    meshes = [mesh for part in parts.values() if (mesh := sharding_of(part).mesh) is not None]
    if not meshes:
        return None
    largest = max(meshes, key=DeviceMesh.size)
    held = set(all_ranks(largest))
    if not all(held.issuperset(all_ranks(mesh)) for mesh in meshes):
        raise ConfigError(f"the parts are sharded over {', '.join(map(str, set(meshes)))}: say over which the rest is")
    return largest


def check_mesh(parts: Mapping[str, nn.Module], mesh: DeviceMesh | None) -> None:
    """Raise ConfigError for a part that cannot be of one model with what is sharded over `mesh`.

    A part may be sharded over some of the model's ranks, as experts are, or be each rank's own, if that was said when
    it was sharded.
    """
    for name, part in parts.items():
        sharding = sharding_of(part)
        if sharding.is_alone and mesh is not None and mesh.ndim > 1:
            raise ConfigError(
                f"{name} is every rank's own, and the model would be on a mesh of {mesh.ndim} dimensions: that goes "
                "with a mesh of one dimension only"
            )
        others = [other for other in (sharding.mesh, *(shard.mesh for shard in sharding.shards)) if other != mesh]
        if sharding.is_alone or all(_ranks(other) == _ranks(mesh) for other in others):
            continue
        if mesh is None or sharding.mesh is None:
            raise ConfigError(
                f"{name} is sharded over the ranks {_ranks(sharding.mesh)}, and the model would be over "
                f"{_ranks(mesh)}: give them one mesh"
            )
        if sharding.parts:
            raise ConfigError(
                f"{name} is sharded on {sharding.mesh}, and the model would be on {mesh}: parameters of a part with a "
                f"mesh of its own cannot stay with {next(iter(sharding.parts))} ranks after the forward; give "
                "reshard_after_forward a bool"
            )


def ranks_of(decision: Decision, parts: Mapping[str, nn.Module]) -> tuple[int, ...]:
    """The ranks that hold the parts of a model, on these ranks; ConfigError if they are no model together."""
    held = {name: found.ranks for name, part in parts.items() if (found := sharding_of(part).holders) is not None}
    [(mesh, parameters), *others] = decision.by_mesh()
    for own_mesh, own in others:
        held[next(iter(own))] = ranks_of_holders(own_mesh, distribution_mesh(own), {})
    return ranks_of_holders(mesh, distribution_mesh(parameters), held)


def holders_of(decision: Decision, parts: Mapping[str, nn.Module]) -> Holders | None:
    """The ranks that hold the parts of a model; all of them call this at the same time."""
    of_parts = (found.mesh for part in parts.values() if (found := sharding_of(part).holders) is not None)
    mesh = decision.mesh or decision.inner or next(of_parts, None)
    return holders_over(decision.ranks, mesh)


def check_not_ignored(model: nn.Module, parts: Mapping[str, nn.Module], ignored: Collection[nn.Parameter]) -> None:
    """Raise ConfigError if a parameter is to be ignored that the parts have sharded."""
    sharded = {each for part in parts.values() for shard in sharding_of(part).shards for each in shard.parameters}
    both = sharded.intersection(ignored)
    for name, parameter in model.named_parameters():
        if parameter in both:
            raise ConfigError(f"ignored_params holds {name}, which is sharded already")


def _ranks(mesh: DeviceMesh | None) -> object:
    return None if mesh is None else nested_ranks(mesh)


def adopt(model: nn.Module, parts: Mapping[str, nn.Module], sharding: Sharding) -> None:
    """Make the shards of `parts` a part of `sharding`, the model's own; tie what was tied before they were sharded."""
    names_of_inner: dict[Sharding, list[str]] = {}  # several for modules that were sharded together
    for name, part in parts.items():
        names_of_inner.setdefault(sharding_of(part), []).append(name)
    for inner, names in names_of_inner.items():
        _take_over(inner, {name: parts[name] for name in names}, sharding)
    read_of_parameter = {
        parameter: read
        for shard in sharding.shards
        for parameter, read in zip(shard.parameters, shard.reads, strict=True)
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (replacement := replacement_of(parameter)) is not None:
                module._parameters[name] = replacement.sharded
                read_of_parameter[replacement.sharded] = replacement.read
    install_reads(model, read_of_parameter, sharding.running)


def _take_over(inner: Sharding, parts: Mapping[str, nn.Module], sharding: Sharding) -> None:
    """Make the shards of `inner`, which is that of all these parts, a part of `sharding`."""
    new_name = _renaming(inner, parts)
    _merge_schedules(inner, sharding, new_name)
    for shard in inner.shards:
        _rename(shard, new_name)
        shard.sharding = sharding
    sharding.shards += inner.shards
    sharding.whole |= {new_name(name): (new_name(unit), value) for name, (unit, value) in inner.whole.items()}
    sharding.owners_of_whole |= {new_name(name): place for name, place in inner.owners_of_whole.items()}
    sharding.divisors |= inner.divisors
    sharding.watched |= {(parameter, hook) for parameter, hook in inner.watched if hook == "divide"}
    for own in inner.owns:
        own.reshard()
        own.names = [new_name(name) for name in own.names]
    sharding.owns += inner.owns
    sharding.checks_gradients |= inner.checks_gradients
    for part in parts.values():
        for module in part.modules():
            if vars(module).get("_fsdp_running") is inner.running:
                vars(module)["_fsdp_running"] = sharding.running
        del vars(part)["_fsdp_sharding"]
        become_part(part)
        vars(part).pop("_compiled_call_impl", None)


def _merge_schedules(inner: Sharding, sharding: Sharding, new_name: Callable[[str], str]) -> None:
    """Let the units of `inner`, under their new names, keep what was decided for their resharding."""
    own = sharding.schedule.reshard_of_unit(sharding.units, num_shards_of(sharding.mesh))
    adopted = inner.schedule.reshard_of_unit(inner.units, num_shards_of(inner.mesh))
    reshard = own | {new_name(unit): value for unit, value in adopted.items()}
    schedule = sharding.schedule
    most = max((each for each in (schedule.reductions, inner.schedule.reductions) if each), default=None)
    sharding.schedule = dataclasses.replace(
        schedule,
        reshard_after_forward=reshard or None,
        forward_lists=(*schedule.forward_lists, *_renamed(inner.schedule.forward_lists, new_name)),
        backward_lists=(*schedule.backward_lists, *_renamed(inner.schedule.backward_lists, new_name)),
        reductions=most,
    )
    sharding.units += [new_name(unit) for unit in inner.units]
    sharding.parts |= inner.parts


def _renamed(lists: Sequence[PrefetchList], new_name: Callable[[str], str]) -> list[PrefetchList]:
    return [PrefetchList(tuple(map(new_name, each.units)), tuple(map(new_name, each.ahead))) for each in lists]


def _rename(shard: FlatShard, new_name: Callable[[str], str]) -> None:
    layout: Layout = shard.layout
    slots = tuple(dataclasses.replace(slot, parameter=new_name(slot.parameter)) for slot in layout.slots)
    unit, kind = ops.unit_of_bucket(layout.bucket), ops.kind_of_bucket(layout.bucket)
    shard.change_layout(dataclasses.replace(layout, slots=slots, bucket=ops.bucket_of_unit(new_name(unit), kind)))


_PIECES = re.compile(r"\+(?=\d+(?:\.|$))")  # between the parts of the name of a unit of a list


def _renaming(inner: Sharding, parts: Mapping[str, nn.Module]) -> Callable[[str], str]:
    """From the names of units and parameters in `inner` to those in the model that holds these parts."""
    if not inner.together:
        [prefix] = parts
        return lambda name: prefix if name == "root" else f"{prefix}.{name}"
    name_of_part = {part: name for name, part in parts.items()}
    prefixes = [name_of_part[module] for module in inner.together]

    def new_name(name: str) -> str:
        """Names begin with the place in the list, as those of a ModuleList do; units of lists are sums of names."""
        if name == "root":
            return "+".join(prefixes)
        places = [piece.partition(".") for piece in _PIECES.split(name)]
        return "+".join(f"{prefixes[int(place)]}{dot}{rest}" for place, dot, rest in places)

    return new_name
