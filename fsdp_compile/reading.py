"""Reading parameters: inside a forward, `module.weight` is the full tensor; elsewhere it is the sharded Parameter.

Each module that owns parameters becomes an instance of a generated subclass of its class, with one property for each
parameter. Dynamo traces the property to a single `fsdp::unshard` of the bucket's shard, a plain tensor; the kernel of that
operator makes the same read work where nothing is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn


@dataclasses.dataclass
class Read:
    """What `fsdp::unshard` takes: the shard, and the constants that say what to take out of it."""

    shard: nn.Parameter
    arguments: tuple[Any, ...]


@dataclasses.dataclass
class Running:
    """Counts the forwards under way of one sharded model; parameters are read as full tensors while there are any."""

    depth: int = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1


def install_reads(model: nn.Module, read_of_parameter: Mapping[nn.Parameter, Read], running: Running) -> None:
    """Make every module of `model` read its parameters as `read_of_parameter` says."""
    for module in model.modules():
        reads = {
            name: read_of_parameter[parameter]
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter in read_of_parameter
        }
        if reads:
            vars(module).update(_fsdp_reads=reads, _fsdp_running=running)
            module.__class__ = _reading_class(type(module), tuple(reads))


@functools.cache
def _reading_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    properties = {name: property(_getter(name)) for name in names}
    return generated_subclass(base, properties)


def generated_subclass(base: type[nn.Module], namespace: Mapping[str, Any], mixin: type | None = None) -> type[nn.Module]:
    """A subclass, with the methods of `mixin` before those of `base`, that prints and documents itself as `base`."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    bases = (base,) if mixin is None else (mixin, base)
    return type(base.__name__, bases, {**names, **namespace})


def _getter(name: str) -> Any:
    def get(module: nn.Module) -> torch.Tensor | None:
        read = module._fsdp_reads.get(name)  # type: ignore[union-attr,operator]
        if read is None or not (torch.compiler.is_compiling() or module._fsdp_running.depth):  # type: ignore[union-attr]
            if name not in module._parameters:
                raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
            return module._parameters[name]
        full: torch.Tensor = torch.ops.fsdp.unshard.default(read.shard, *read.arguments)
        return full

    return get
