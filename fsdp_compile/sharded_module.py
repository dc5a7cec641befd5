"""The sharded root module: what a model gains by being sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.nn as nn

from .errors import ConfigError
from .graphs import RewrittenGraphs
from .reading import generated_subclass
from .sharding import note_sharding, sharding_of


def become_sharded(model: nn.Module) -> None:
    """Give a model whose parameters are sharded its new class."""
    gained = {name: value for name, value in _GAINED.items() if not hasattr(model, name)}
    model.__class__ = generated_subclass(type(model), gained, mixin=ShardedModule)


class ShardedModule:
    """Mixed into the class of a sharded root module: during its call, parameters read as full tensors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharding = sharding_of(self)  # type: ignore[arg-type]
        if not torch.compiler.is_compiling():
            sharding.prepare()
        with sharding.running():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for shard in sharding_of(self).shards:  # type: ignore[arg-type]
            if shard.accumulation is not None:
                shard.accumulation.clear()

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
            shard.reads = [memo[id(read)] for read in original.reads]
        note_sharding(copied, sharding_of(copied))  # type: ignore[arg-type]
        if sharding.compile is not None:
            sharding.compile(copied)
        return copied


def _set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool) -> None:
    """Whether the backwards of the next forwards reduce gradients; if not, they keep them, full, on every rank.

    The first backward that reduces again reduces what was kept, together with its own gradients. Until then `.grad`
    of the parameters does not change, and `optimizer.zero_grad()` does not reach what is kept; `model.zero_grad()`
    does. With a single rank there is nothing to reduce.
    """
    if not isinstance(requires_gradient_sync, bool):
        raise ConfigError(f"requires_gradient_sync is a bool, not {requires_gradient_sync!r}")
    sharding_of(model).keeps_gradients = not requires_gradient_sync


@contextmanager
def _no_sync(model: nn.Module) -> Iterator[None]:
    """Forwards inside keep the gradients of their backwards for a later one: see `set_requires_gradient_sync`."""
    sharding = sharding_of(model)
    before, sharding.keeps_gradients = sharding.keeps_gradients, True
    try:
        yield
    finally:
        sharding.keeps_gradients = before


def _module(model: nn.Module) -> nn.Module:
    """The model itself, as scripts written for DistributedDataParallel expect."""
    return model


def _graphs(model: nn.Module) -> list[RewrittenGraphs]:
    """The rewritten graphs, one for each set of guards that was compiled."""
    return sharding_of(model).graphs


_GAINED = {
    "module": property(_module),
    "graphs": property(_graphs),
    "no_sync": _no_sync,
    "set_requires_gradient_sync": _set_requires_gradient_sync,
}
