"""Decide how a model is to be sharded, on any ranks; what cannot be is refused before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn as nn

from ..errors import ConfigError
from ..layout.buckets import check_parameters
from ..layout.communication import find_communication
from ..layout.distribution import distribution_mesh
from ..layout.placements import find_placements
from ..layout.precision import find_precision
from ..layout.unit_meshes import OwnMesh
from ..layout.units import Unit, find_units
from ..options import Options
from ..runtime.wrappers import refuse_wrapped
from .adoption import adopted_parameters, check_not_ignored, sharded_around, sharded_parts
from .decision import Decision, check_modules
from .newcomers import newcomers, refuse
from .sharding import sharding_of

NOWHERE: Mapping[str, OwnMesh] = MappingProxyType({})


def decide(model: nn.Module, options: Options, own_meshes: Mapping[str, OwnMesh] = NOWHERE) -> Decision:
    """How a model is to be sharded, on any ranks; ConfigError if it cannot be, or not by these options.

    Args:
        own_meshes: of parameters, by name, that are not on the model's mesh.
    """
    parameters = check_model(model, options.ignored)
    units = find_units(model, options.auto_wrap_policy, frozenset(model.parameters()) - frozenset(parameters.values()))
    names = [unit.name for unit in units]
    options.schedule.check_globs(names)
    precision = find_precision(model, options.mp_policy, _modules_of(units, model))
    dims, placed = find_placements(parameters, options.shard_placement_fn)
    decision = Decision(
        options,
        parameters,
        units,
        precision,
        options.schedule,
        dim_of_parameter=dims,
        communication_of_unit=find_communication(options.communication, names),
        own_meshes={name: own for name, own in {**own_meshes, **placed}.items() if name in parameters},
    )
    for _, together in decision.by_mesh():
        distribution_mesh(together)  # raises for parameters that are distributed as none can be
    return decision


def check_model(model: object, ignored: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters to shard, by name; raises ConfigError for a model that cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is an nn.Module, not {type(model).__name__}")
    held = set(model.parameters())
    for parameter in ignored:
        if not isinstance(parameter, nn.Parameter) or parameter not in held:
            found = f"a tensor of shape {tuple(parameter.shape)}" if torch.is_tensor(parameter) else repr(parameter)
            raise ConfigError(f"ignored_params holds parameters of the model, and {found} is none")
    parts = sharded_parts(model)
    check_not_ignored(model, parts, ignored)
    for name, part in parts.items():
        came = newcomers(part, sharding_of(part).left)
        refuse([f"{name}.{inner}" for inner, parameter in came.items() if parameter not in set(ignored)], name)
    left_out = {*ignored, *adopted_parameters(model, parts)}
    parameters = {name: value for name, value in model.named_parameters() if value not in left_out}
    if around := sharded_around(model, parts) & parameters.keys():
        raise ConfigError(
            f"{min(around)} is sharded already, with a module around {type(model).__name__}: shard modules from the "
            "inside to the outside"
        )
    refuse_wrapped(model, set(parameters.values()))
    check_parameters(parameters)
    check_modules(model, set(parameters.values()))
    return parameters


def _modules_of(units: list[Unit], model: nn.Module) -> list[str]:
    """The names of the modules that are units."""
    names = {name for name, _ in model.named_modules()}
    return [unit.name for unit in units if unit.name in names and not unit.is_run]
