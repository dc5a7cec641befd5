"""FSDP1's state dicts of optimizers: by the names of parameters, full or as DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ConfigError
from ..module.sharding import sharding_around
from ..runtime.comparison import Line
from .state_dicts import is_first_rank, is_rank0_only, settings_of

State = dict[str, Any]

_CHECKPOINTED = "_checkpoint_wrapped_module."  # in names that torch's checkpoint_wrapper makes, except in state dicts


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State | None = None,
    group: dist.ProcessGroup | None = None,
) -> State:
    """The optimizer's state by parameter names: full tensors, or DTensors inside `state_dict_type(SHARDED)`.

    Args:
        optim_state_dict: what `optim.state_dict()` gave; None calls it.
        group: not needed: tensors know their ranks.
    """
    state = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return _named(state, model, _parameters_of(model, optim), settings_of(model).optim_state_dict_config)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: dist.ProcessGroup | None = None,
) -> State:
    """The whole state of the optimizer, on the CPU; with `rank0_only` other ranks get an empty one."""
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return _named(optim.state_dict(), model, _parameters_of(model, optim, optim_input), config)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> State:
    """The optimizer's state as DTensors, by parameter names."""
    return _named(optim.state_dict(), model, _parameters_of(model, optim), ShardedOptimStateDictConfig())


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: State,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> State:
    """What `optim.load_state_dict` takes, of what `optim_state_dict` gave; the state given is left as it is.

    Args:
        is_named_optimizer: leave the names of parameters as keys, in the place of numbers.
        load_directly: let `optim` load it, too.
    """
    state = optim_state_dict
    if is_rank0_only(settings_of(model).optim_state_dict_config):
        state = _from_first_rank(state, model, group)
    parameters = _parameters_of(model, optim)
    loadable = _sharded(state, parameters)
    if not is_named_optimizer:
        loadable = _renamed(loadable, {name: number for number, name in enumerate(parameters)})
    if load_directly:
        optim.load_state_dict(loadable)
    return loadable


def shard_full_optim_state_dict(
    full_optim_state_dict: State,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> State:
    """What `optim.load_state_dict` takes, of a full state that every rank has."""
    parameters = _parameters_of(model, optim, optim_input)
    numbers = {name: number for number, name in enumerate(parameters)}
    return _renamed(_sharded(full_optim_state_dict, parameters), numbers)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: State, model: nn.Module, optim: torch.optim.Optimizer
) -> State:
    """What `optim.load_state_dict` takes, of a state of DTensors."""
    return shard_full_optim_state_dict(sharded_optim_state_dict, model, optim=optim)


def scatter_full_optim_state_dict(
    full_optim_state_dict: State | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any = None,
) -> State:
    """What `optim.load_state_dict` takes, of a full state that the first rank has; others pass None or anything."""
    return shard_full_optim_state_dict(_from_first_rank(full_optim_state_dict, model, group), model, optim_input, optim)


def rekey_optim_state_dict(
    optim_state_dict: State,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: torch.optim.Optimizer | None = None,
) -> State:
    """A state whose keys are parameters' numbers instead of their names, or the other way, of any model."""
    parameters = _parameters_of(model, optim, optim_input)
    if optim_state_key_type is OptimStateKeyType.PARAM_NAME:
        return _renamed(optim_state_dict, dict(enumerate(parameters)))
    if optim_state_key_type is OptimStateKeyType.PARAM_ID:
        return _renamed(optim_state_dict, {name: number for number, name in enumerate(parameters)})
    raise ConfigError(f"optim_state_key_type is an OptimStateKeyType, not {optim_state_key_type!r}")


def _parameters_of(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: Any = None
) -> dict[str, torch.Tensor]:
    """The optimizer's parameters in its order, by their names in the model.

    Args:
        optim_input: what the optimizer was made of, where it is not given; with neither, `model.parameters()`.
    """
    if optim_input is not None:  # FSDP1's words
        warnings.warn("The `optim_input` argument is deprecated: pass `optim`", FutureWarning, stacklevel=3)
    name_of = _names(model)
    given: Iterable[Any] = model.parameters() if optim_input is None else optim_input
    groups = optim.param_groups if optim is not None else list(given)
    inputs = [item for group in groups for item in (group["params"] if isinstance(group, dict) else [group])]
    strange = next((parameter for parameter in inputs if parameter not in name_of), None)
    if strange is not None:
        raise ConfigError(f"a parameter of the optimizer, of shape {tuple(strange.shape)}, is not in the model")
    return {name_of[parameter]: parameter for parameter in inputs}


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name.replace(_CHECKPOINTED, "") for name, parameter in model.named_parameters()}


def _named(state: State, model: nn.Module, parameters: dict[str, torch.Tensor], config: OptimStateDictConfig) -> State:
    """A state of numbers with names, and with tensors as `config` says. Every rank calls this.

    The states of parameters are in the order of the model, whichever order the optimizer of a rank has.

    Raises:
        RankError: full tensors are asked for, and the optimizers of two ranks have states for different sharded
            parameters. Others may differ: a rank's own part of a table of embeddings, say.
    """
    named = _renamed(state, dict(enumerate(parameters)))
    in_order = dict.fromkeys([*_names(model).values(), *named["state"]])
    named["state"] = {name: named["state"][name] for name in in_order if name in named["state"]}
    is_full, to_cpu = isinstance(config, FullOptimStateDictConfig), config.offload_to_cpu
    sharding = sharding_around(model)
    if is_full and sharding is not None and sharding.agreement is not None:
        gathered = {
            name: [key for key, value in values.items() if isinstance(value, DTensor)]
            for name, values in named["state"].items()
        }
        states = [f"the state of {name}: {', '.join(keys)}" for name, keys in gathered.items() if keys]
        sharding.agreement.agree([Line("a full state of an optimizer"), *map(Line, states)])
    named["state"] = {
        name: {key: _owned(value, is_full, to_cpu) for key, value in values.items()}
        for name, values in named["state"].items()
    }
    return {} if is_rank0_only(config) and not is_first_rank(model) else named


def _owned(value: Any, is_full: bool, to_cpu: bool) -> Any:
    """Of a tensor, one that later steps do not change."""
    if not torch.is_tensor(value):
        return value
    full = value.full_tensor() if isinstance(value, DTensor) and is_full else value
    owned = full.clone() if full is value else full
    return owned.cpu() if to_cpu else owned


def _renamed(state: State, key_of: dict[Any, Any]) -> State:
    """With other keys of parameters; what belongs to others, as to modules that have a name, stays as it is."""
    renamed = {**state, "state": {key_of.get(key, key): value for key, value in state["state"].items()}}
    if "param_groups" in state:
        renamed["param_groups"] = [
            {**group, "params": [key_of.get(key, key) for key in group["params"]]} for group in state["param_groups"]
        ]
    return renamed


def _sharded(state: State, parameters: dict[str, torch.Tensor]) -> State:
    """A state by names, whose full tensors become what this rank holds of them."""
    return {
        **state,
        "state": {
            name: {key: _like(value, parameters[name]) for key, value in values.items()}
            if name in parameters
            else values
            for name, values in state["state"].items()
        },
    }


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A full tensor of the parameter's shape, sharded as the parameter is; others as they are, copied."""
    if not torch.is_tensor(value):
        return value
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value.clone()
    placed = value.detach().to(parameter.device)
    return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _from_first_rank(state: State | None, model: nn.Module, group: Any) -> State:
    if not dist.is_initialized():
        return state or {}
    objects = [state if is_first_rank(model) else None]
    dist.broadcast_object_list(objects, group=group, group_src=0)
    return objects[0] or {}
