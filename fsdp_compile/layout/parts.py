"""Tensors that hold others, as weights in NF4 or int8 do: their parts become parameters, which are sharded as any are.

The forward makes the tensor of its parts, where it reads it. So the parts are what is gathered: a fourth of the bytes,
say, of a weight whose values are wanted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import ConfigError


class OfParts(nn.Module):
    """A parametrization of torch.nn.utils: a tensor that holds others is made of these."""

    form: _Form  # of the tensor that was registered, or assigned since

    def right_inverse(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        self.form = _Form.of(tensor)
        return list(self.form.parts_of(tensor))

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self.form.made_of(iter(parts))

    def extra_repr(self) -> str:
        return str(self.form.cls.__name__)


class Parts(parametrize.ParametrizationList):
    """The parts of one tensor. Outside of a forward, a call of it is a read of an attribute, and gathers nothing."""


@dataclasses.dataclass(frozen=True)
class _Form:
    """How a tensor is made of its parts; those that hold others themselves have a form of their own."""

    cls: Any
    inner: dict[str, _Form | None]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> _Form:
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        inner = {name: cls.of(part) if is_traceable_wrapper_subclass(part) else None for name, part in parts.items()}
        return cls(type(tensor), inner, context, tensor.size(), tensor.stride())

    def parts_of(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for name, form in self.inner.items():
            part = getattr(tensor, name)
            yield from [part] if form is None else form.parts_of(part)

    def made_of(self, parts: Iterator[torch.Tensor]) -> torch.Tensor:
        inner = {name: next(parts) if form is None else form.made_of(parts) for name, form in self.inner.items()}
        return self.cls.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[no-any-return]


def holds_others(tensor: torch.Tensor) -> bool:
    """Whether it is made of other tensors, as those in NF4 are; DTensors are another matter."""
    return bool(is_traceable_wrapper_subclass(tensor)) and not isinstance(tensor, DTensor)


def unwrap_tensor_subclasses(model: nn.Module) -> nn.Module:
    """Make the parts of frozen weights that hold other tensors parameters of `model`, so that they can be sharded.

    Weights in NF4 (torchao's `to_nf4`) or int8 (its `quantize_`) hold integers and scales in tensors of their own. Each
    of these becomes a parameter, without a gradient and without a policy that casts it; the module makes the weight of
    them whenever it reads it. `torch.nn.utils.parametrize` does that: parts of `weight` are named
    `parametrizations.weight.original0` and so on, also in state dicts. A weight that modules share stays shared.

    Returns:
        The same object.

    Raises:
        ConfigError: one of them is to be trained; the model is untouched.
    """
    for qualified, parameter in model.named_parameters():
        if holds_others(parameter) and parameter.requires_grad:
            raise ConfigError(
                f"{qualified}, a {type(parameter).__name__}, is to be trained: gradients are of a tensor, not of the "
                "parts that it holds. Freeze it with requires_grad_(False), or use a plain tensor"
            )
    found = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and holds_others(parameter)
    ]
    parts_of: dict[nn.Parameter, nn.Module] = {}
    for module, name, parameter in found:
        parametrize.register_parametrization(module, name, OfParts(), unsafe=True)
        parts = module.parametrizations[name]  # type: ignore[index]
        parts.__class__ = Parts
        parts._parameters.update(parts_of.setdefault(parameter, parts)._parameters)  # type: ignore[union-attr,arg-type]
    return model


def names_of_parts(model: nn.Module) -> set[str]:
    """The names of parameters that are parts of a tensor. They keep their dtype: the tensor is made of these values."""
    return {
        name
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Parts)
        for name, _ in module.named_parameters(prefix, recurse=False)
    }
