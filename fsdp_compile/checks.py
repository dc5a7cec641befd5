"""Checks of options: what an argument may be, and the error that says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch

from .errors import ConfigError

Auto = Literal["auto"]


def is_auto(value: object) -> TypeGuard[Auto]:
    """Whether an option is left open; of what may be a tensor or an array, too."""
    return isinstance(value, str) and value == "auto"


def check_bool(name: str, value: object) -> None:
    """Raise ConfigError unless the option `name` is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is a bool, not {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ConfigError unless the option `name` is one of these texts."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is one of {choices}, not {value!r}")


def check_dtype(name: str, value: object) -> None:
    """Raise ConfigError unless the option `name` is None or a floating point dtype."""
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ConfigError(f"{name} is None or a floating point dtype, not {value!r}")


def check_call(name: str, function: Callable[..., Any], *args: str, **kwargs: str) -> None:
    """Raise ConfigError unless `function`, of the option `name`, can be called with so many arguments, so named."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C say nothing
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as e:
        called = ", ".join([*args, *(f"{key}=..." for key in kwargs)])
        known_as = getattr(function, "__qualname__", type(function).__qualname__)
        raise ConfigError(f"{name}: {known_as}{signature} is called as ({called}): {e}") from None


def listed(name: str, value: object, what: str) -> list[Any]:
    """The items of the option `name`; ConfigError unless it is an iterable of `what`, which the caller looks at."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping, torch.Tensor, type)):
        raise ConfigError(f"{name} is an iterable of {what}, not {value!r}")
    return list(value)
