"""Equal layers: modules of a list that differ in nothing but the values of their tensors, and in their number.

They are called one after another, as a transformer's layers are: what a few of them are traced as tells what the others
would be.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

_LISTS = (nn.ModuleList, nn.Sequential)


@dataclasses.dataclass(frozen=True)
class EqualLayers:
    """All modules of a list.

    Attributes:
        name: of the list, in its model.
    """

    name: str
    modules: nn.ModuleList | nn.Sequential

    @classmethod
    def of(cls, model: nn.Module, num_calls: Counter[nn.Module]) -> EqualLayers | None:
        """The longest list of equal layers in the model, each of which was called once; None where there is none."""
        lists = [(name, module) for name, module in model.named_modules() if isinstance(module, _LISTS)]
        for name, modules in sorted(lists, key=lambda found: -len(found[1])):
            if len(modules) < 2 or any(num_calls[module] != 1 for module in modules):
                continue
            if all(are_equal(*pair) for pair in pairwise(modules)):
                return cls(name, modules)
        return None

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def names(self) -> list[str]:
        """Of all layers, in the model."""
        return [f"{self.name}.{name}" if self.name else name for name in self.modules._modules]

    def compute_again(self) -> None:
        """Have every layer computed again in the backward: only its input is kept for that."""
        for layer in self.modules:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @contextmanager
    def shortened(self, number: int) -> Iterator[None]:
        """Inside, the list has only so many layers, the first ones."""
        layers = dict(self.modules._modules)
        try:
            for name in list(layers)[number:]:
                del self.modules._modules[name]
            yield
        finally:
            self.modules._modules.update(layers)


@contextmanager
def calls_counted(model: nn.Module) -> Iterator[Counter[nn.Module]]:
    """Counts how often each module of a list in the model is called inside."""
    counts: Counter[nn.Module] = Counter()
    layers = [layer for module in model.modules() if isinstance(module, _LISTS) for layer in module]
    hooks = [layer.register_forward_pre_hook(lambda module, _: counts.update([module])) for layer in set(layers)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def are_equal(layer: Any, following: Any) -> bool:
    """False for what cannot be compared, too, as arrays: whatever modules hold may raise any error."""
    try:
        return _Comparison().are_equal(layer, following)
    except Exception:
        return False


class _Comparison:
    """Of a layer and the next one, and of all that they consist of."""

    def __init__(self) -> None:
        self._compared: dict[tuple[int, int], tuple[Any, Any]] = {}  # holds on to what has these ids

    def are_equal(self, some: Any, other: Any) -> bool:
        """Whether nothing differs but the values of tensors, and numbers by one: those of layers are counted up."""
        if some is other or (id(some), id(other)) in self._compared:
            return True
        if type(some) is not type(other):
            return False
        self._compared[id(some), id(other)] = some, other
        if isinstance(some, int) and not isinstance(some, bool):
            return other - some in (0, 1)
        if isinstance(some, torch.Tensor):
            return _kind(some) == _kind(other)
        if (parts := _parts(some)) is None:
            return bool(some == other)
        others = _parts(other)
        assert others is not None  # their types are the same
        return len(parts) == len(others) and all(map(self.are_equal, parts, others))


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What graphs depend on of a tensor."""
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, getattr(tensor, "_spec", None)


def _parts(value: Any) -> list[Any] | None:
    """What an object consists of; None where it is to be compared as a whole."""
    if isinstance(value, Mapping):
        return [part for key, each in value.items() for part in ((each,) if isinstance(key, int) else (key, each))]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        return [value.__code__, value.__defaults__, value.__kwdefaults__, inspect.getclosurevars(value).nonlocals]
    is_compared_by_identity = "__eq__" not in {name for base in type(value).__mro__[:-1] for name in vars(base)}
    return [vars(value)] if is_compared_by_identity and hasattr(value, "__dict__") else None
