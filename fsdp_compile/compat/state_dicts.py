"""FSDP1's `state_dict_type`: what `module.state_dict()` and `optim_state_dict` give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..module.sharding import sharding_around
from ..runtime.ranks import all_ranks
from .wrapped import fsdp_modules, outermost

_SETTINGS = "_fsdp_state_dict_settings"
_DTENSORS = StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), FullOptimStateDictConfig())
"""Of models that were sharded by another name."""


def have_full_states(modules: Iterable[nn.Module]) -> None:
    """Modules that were wrapped give full tensors, until something else is said, as FSDP1's do."""
    settings = StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
    for part in modules:
        _set(part, settings)


def settings_of(module: nn.Module) -> StateDictSettings:
    """Of a wrapped module, or what holds some: those of the first."""
    return next((vars(part)[_SETTINGS] for part in fsdp_modules(module) if _SETTINGS in vars(part)), _DTENSORS)


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """What state dicts of `module` hold from now on: full tensors, or DTensors. Returns what they held before."""
    settings = _checked(state_dict_type, state_dict_config, optim_state_dict_config)
    outermost(module)  # raises where there is none
    before = settings_of(module)
    for part in fsdp_modules(module):
        _set(part, settings)
    return before


def _set(part: nn.Module, settings: StateDictSettings) -> None:
    if _SETTINGS not in vars(part):
        part.register_state_dict_post_hook(_convert)
    vars(part)[_SETTINGS] = settings


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """What `module.state_dict()` and `optim_state_dict` give inside: DTensors, or full tensors.

    Outside, `module.state_dict()` gives full tensors, or DTensors of a model that `FullyShardedDataParallel` did not
    shard. `load_state_dict` takes either at any time. Every rank calls `state_dict()`; with `rank0_only` the others get
    an empty one. So it is with `optim_state_dict`, and `optim_state_dict_to_load` then takes the state from the first
    rank.
    """
    before = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for part in fsdp_modules(module):
            vars(part)[_SETTINGS] = before


def _checked(
    state_dict_type: StateDictType, config: StateDictConfig | None, optimizer: OptimStateDictConfig | None
) -> StateDictSettings:
    if state_dict_type is StateDictType.LOCAL_STATE_DICT:
        raise ConfigError("LOCAL_STATE_DICT is not supported: there are no flat parameters to save")
    if state_dict_type is StateDictType.FULL_STATE_DICT:
        config, optimizer = config or FullStateDictConfig(), optimizer or FullOptimStateDictConfig()
        kinds: tuple[type, type] = (FullStateDictConfig, FullOptimStateDictConfig)
    else:
        config, optimizer = config or ShardedStateDictConfig(), optimizer or ShardedOptimStateDictConfig()
        kinds = (ShardedStateDictConfig, ShardedOptimStateDictConfig)
    for given, kind in zip((config, optimizer), kinds, strict=True):
        if not isinstance(given, kind):
            raise ConfigError(f"{type(given).__name__} is no configuration for {state_dict_type}: {kind.__name__} is")
    return StateDictSettings(state_dict_type, config, optimizer)


def _convert(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Make the tensors of a module's state dict full or not, and move them, as its settings say."""
    config = vars(module)[_SETTINGS].state_dict_config
    for name, value in list(state.items()):
        if name.startswith(prefix) and torch.is_tensor(value):
            is_full = isinstance(config, FullStateDictConfig)
            full = value.full_tensor() if isinstance(value, DTensor) and is_full else value
            state[name] = full.cpu() if config.offload_to_cpu else full
            if is_rank0_only(config) and not is_first_rank(module):
                del state[name]


def is_rank0_only(config: StateDictConfig | OptimStateDictConfig) -> bool:
    return isinstance(config, (FullStateDictConfig, FullOptimStateDictConfig)) and config.rank0_only


def is_first_rank(module: nn.Module) -> bool:
    """Whether this is the first rank of the mesh that the module is sharded over."""
    sharding = sharding_around(module)
    mesh = None if sharding is None else sharding.mesh
    return mesh is None or mesh.get_rank() == all_ranks(mesh)[0]
