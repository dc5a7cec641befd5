"""Wrappers that train a module on several ranks in their own way, around a sharded one or inside what is to be sharded.

They are refused where they first show: DistributedDataParallel and DataParallel of torch register the module as theirs;
its FullyShardedDataParallel sets attributes of every module before it changes one; `fully_shard` and `replicate` note
themselves on the module, and ask for the note. accelerate asks whether the model is prepared already, and is answered.

Private, as of torch 2.11 to 2.15: those attributes, and the keys of those notes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import ConfigError
from .accelerate import is_prepared

_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
_FUNCTIONS = ("fully_shard", "replicate")


class ShardedHere(RegistryItem):
    """What we note, by the name of `fully_shard`, on a module that we have sharded."""


def refuse_wrapped(model: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Raise ConfigError if one of the parameters, which are to be sharded, is in a module that was wrapped."""
    for name, module in model.named_modules():
        notes = vars(module).get(REGISTRY_KEY, {})
        noted = [each for each in _FUNCTIONS if each in notes and not isinstance(notes[each], ShardedHere)]
        wrapper = f"a {type(module).__name__} of torch" if isinstance(module, _WRAPPERS) else "".join(noted[:1])
        if wrapper and any(parameter in parameters for parameter in module.parameters()):
            raise ConfigError(
                f"{name or 'the model'} is wrapped already, by {wrapper}, which moves parameters or gradients between "
                "ranks itself: shard the model instead of wrapping it"
            )


def refuse_registration(outer: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise ConfigError if a wrapper takes a sharded module; it is what torch calls for every registration of one."""
    if isinstance(outer, (DistributedDataParallel, DataParallel)) and module is not None:
        left = getattr(outer, "parameters_to_ignore", ())
        if any(inner not in left for inner in _sharded_parameters(module)):
            raise _wraps(f"{type(outer).__name__} of torch", module)


def note_sharded(module: nn.Module, state: object) -> None:
    """Note that a module was sharded by a call of its own, and its state, where torch's composable functions look.

    `fully_shard.state` finds the state, and `replicate` around the module leaves its parameters alone.
    """
    states, registry = vars(module).get(STATE_KEY, {}), vars(module).get(REGISTRY_KEY, {})
    vars(module)[STATE_KEY] = States(module, {**states, _FULLY_SHARD: state})
    vars(module)[REGISTRY_KEY] = Registry({**registry, "fully_shard": ShardedHere()})


class States(dict[Callable[..., Any], Any]):
    """What composable functions have noted of a module, by function. A copy, or one from a file, is noted anew."""

    def __init__(self, module: nn.Module, states: Mapping[Callable[..., Any], Any]) -> None:
        super().__init__(states)
        self.module = module

    def __contains__(self, function: object) -> bool:
        """What torch's `fully_shard` asks before it shards: ConfigError if there are shards."""
        found = super().__contains__(function)
        if found and function is _FULLY_SHARD and _sharded_parameters(self.module):
            raise _wraps("fully_shard of torch", self.module)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({function: state for function, state in self.items() if function is not _FULLY_SHARD},)


class Registry(dict[str, RegistryItem]):
    """By the name of a function, and otherwise as `States`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: item for name, item in self.items() if name != "fully_shard"},)


_FULLY_SHARD: Callable[..., Any] = fully_shard.__wrapped__  # type: ignore[attr-defined]  # the key of its states


class RefusesWrappers:
    """Mixed into modules with sharded parameters at or below them."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        was_prepared = bool(vars(self).get("_is_accelerate_prepared"))
        if not _sharded_parameters(self):  # type: ignore[arg-type]
            return was_prepared
        return is_prepared(self, was_prepared, sys._getframe(1))  # type: ignore[arg-type]

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        vars(self)["_is_accelerate_prepared"] = value

    # What FSDP sets first, `_is_fsdp_managed_module`, cannot be watched: Dynamo reads it past properties.
    @property
    def _fsdp_use_orig_params(self) -> bool:
        if "_fsdp_use_orig_params" not in vars(self):  # a model of peft has the attributes of the one in it
            raise AttributeError("_fsdp_use_orig_params")
        return bool(vars(self)["_fsdp_use_orig_params"])

    @_fsdp_use_orig_params.setter
    def _fsdp_use_orig_params(self, value: bool) -> None:
        if _sharded_parameters(self):  # type: ignore[arg-type]
            if not vars(self).get("_fsdp_use_orig_params"):  # else it was there before
                vars(self).pop("_is_fsdp_managed_module", None)
            raise _wraps("FullyShardedDataParallel of torch", self)
        vars(self)["_fsdp_use_orig_params"] = value


def _note_of(self: Any) -> Any:
    """What functions of torch's composable API have noted on a module."""
    noted = vars(self).get(REGISTRY_KEY)
    if noted is None:
        raise AttributeError(REGISTRY_KEY)
    last = next(reversed(noted), None)
    if last in _FUNCTIONS and not isinstance(noted[last], ShardedHere) and _sharded_parameters(self):
        for key in (STATE_KEY, REGISTRY_KEY):
            vars(self)[key].popitem()
            if not vars(self)[key]:
                del vars(self)[key]
        raise _wraps(f"{last} of torch", self)
    return noted


setattr(RefusesWrappers, REGISTRY_KEY, property(_note_of))  # another name in every process


def _sharded_parameters(module: nn.Module) -> list[str]:
    """The names of the parameters at or below `module` that we have sharded over several ranks."""
    return [
        f"{path}.{name}".removeprefix(".")
        for path, owner in module.named_modules()
        for name in vars(owner).get("_fsdp_reads", ())
        if isinstance(owner._parameters.get(name), DTensor)
    ]


def _wraps(wrapper: str, module: Any) -> ConfigError:
    first = _sharded_parameters(module)[0]
    return ConfigError(
        f"{wrapper} around the {type(module).__name__}, whose {first} is sharded already. A call of what is sharded "
        f"gathers its parameters, and the backward reduces their gradients: use the model as it is, or shard the whole"
    )
