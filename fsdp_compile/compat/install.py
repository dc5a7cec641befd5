"""One line for code that others wrote: torch's names of FSDP mean ours wherever that code looks them up.

Frameworks import `fully_shard` where they use it, or when they are imported themselves, from one of several modules of
torch. `install` replaces torch's objects in those modules of torch, and in every module outside of torch that holds
one, under whatever name. What is imported while it lasts holds ours, and gets torch's back, too.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel as of_torch_wrapper
from torch.distributed.fsdp import fully_shard as _fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as _register

from ..compiler.options import CompileConfig
from ..module import sharded_module
from ..module.reading import is_reading
from .fully_shard import fully_shard as our_fully_shard
from .fully_sharded_data_parallel import FullyShardedDataParallel as OurFullyShardedDataParallel
from .wrapped import WrappedType

_OF_TORCH = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)  # other modules of torch keep what they hold: it works on models that torch has sharded
_OURS = __name__.partition(".")[0]

_installed: list[Installation] = []  # the innermost last
_lock = threading.RLock()


class Installation:
    """What `install` gives back: leaving it as a context, or `uninstall`, undoes it."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def uninstall(self) -> None:
        """Undo `install`; a second time, nothing."""
        with _lock:
            if self not in _installed:
                return
            _installed.remove(self)
            if not _installed:
                _replace({id(ours): theirs for ours, theirs in _PAIRS})

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(*, backend: str = "inductor") -> Installation:
    """Put `fully_shard`, `register_fsdp_forward_method` and `FullyShardedDataParallel` in torch's place.

    From then on, code that shards by torch's names gets compiled models, in all threads of the process. Each call
    stands for itself: while several are installed, the last one's options hold, and torch's names come back when all
    are undone. Models that were sharded stay so. What was imported under one of the names meanwhile, and kept where
    this cannot see it, as in a closure, does from then on what torch's does.

    Args:
        backend: of every sharding made through the names, unless the call names one: see `fsdp_compile`.

    Raises:
        ConfigError: no such backend; nothing is replaced.
    """
    CompileConfig(backend)
    installation = Installation(backend)
    with _lock:
        for name in _OF_TORCH:
            importlib.import_module(name)
        _replace({id(theirs): ours for ours, theirs in _PAIRS})
        _installed.append(installation)
    return installation


def _replace(object_of_id: dict[int, Any]) -> None:
    for holder, name, value in list(_held()):
        if id(value) in object_of_id:
            holder[name] = object_of_id[id(value)]


def _held() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What modules hold under their names; of torch's, those that others import from."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("torch", _OURS) and module_name not in _OF_TORCH:
            continue
        holder = getattr(module, "__dict__", None)
        if isinstance(holder, dict):
            yield from ((holder, name, value) for name, value in list(holder.items()))


def _options(given: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a sharding by ours; None where nothing is installed any more."""
    with _lock:
        return {"backend": _installed[-1].backend} | given if _installed else None


def fully_shard(module: Any, *args: Any, **given: Any) -> Any:
    """torch.distributed.fsdp.fully_shard, while it is replaced."""
    options = _options(given)
    return _fully_shard(module, *args, **given) if options is None else our_fully_shard(module, *args, **options)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """torch.distributed.fsdp.register_fsdp_forward_method, while it is replaced."""
    ours = isinstance(module, nn.Module) and is_reading(sharded_module.inside(module))
    register: Callable[..., None] = sharded_module.register_fsdp_forward_method if ours else _register
    register(module, method_name)


class _WrapperType(WrappedType):
    """isinstance is whether a model is torch's wrapper: frameworks take `.module` of wrappers until there is none."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, of_torch_wrapper)


class FullyShardedDataParallel(OurFullyShardedDataParallel, metaclass=_WrapperType):
    """torch.distributed.fsdp.FullyShardedDataParallel, while it is replaced."""

    def __new__(cls, *args: Any, **given: Any) -> nn.Module:  # type: ignore[misc]  # as the class that it extends
        options = _options(given)
        if options is None:
            return of_torch_wrapper(*args, **given)
        return OurFullyShardedDataParallel(*args, **options)


_PAIRS: tuple[tuple[Any, Any], ...] = (
    (fully_shard, _fully_shard),
    (register_fsdp_forward_method, _register),
    (FullyShardedDataParallel, of_torch_wrapper),
)
