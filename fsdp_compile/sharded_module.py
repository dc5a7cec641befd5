"""The sharded root module: what a model gains by being sharded."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
import torch.nn as nn

from .errors import ConfigError
from .graphs import RewrittenGraphs
from .reading import generated_subclass
from .sharding import note_sharding, sharding_of


def become_sharded(model: nn.Module) -> None:
    """Give a model whose parameters are sharded its new class."""
    gained = {name: value for name, value in _PROPERTIES.items() if not hasattr(model, name)}
    model.__class__ = generated_subclass(type(model), gained, mixin=ShardedModule)


class ShardedModule:
    """Mixed into the class of a sharded root module: during its call, parameters read as full tensors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharding = sharding_of(self)  # type: ignore[arg-type]
        if not torch.compiler.is_compiling():
            sharding.check()
        with sharding.running():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError("a sharded model cannot be pickled: save its state_dict, with torch.distributed.checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another model, sharded and compiled like this one, with shards of its own; process groups are shared."""
        sharding = sharding_of(self)  # type: ignore[arg-type]
        memo |= {id(sharding.mesh): sharding.mesh, id(sharding.graphs): []}
        copies = [shard.copy_into(memo) for shard in sharding.shards]
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))  # type: ignore[attr-defined]
        for shard, original in zip(copies, sharding.shards, strict=True):
            shard.owners = [(memo[id(module)], name) for module, name in original.owners]
        note_sharding(copied, sharding_of(copied))  # type: ignore[arg-type]
        if sharding.compile is not None:
            sharding.compile(copied)
        return copied


def _module(model: nn.Module) -> nn.Module:
    """The model itself, as scripts written for DistributedDataParallel expect."""
    return model


def _graphs(model: nn.Module) -> list[RewrittenGraphs]:
    """The rewritten graphs, one for each set of guards that was compiled."""
    return sharding_of(model).graphs


_PROPERTIES = {"module": property(_module), "graphs": property(_graphs)}
