"""Activation checkpointing that torch's composable API added to modules, as a part of their forward.

`torch.distributed._composable.checkpoint(module)` is a pair of hooks, which Dynamo cannot trace: it would compile what
runs between them, while the backward recomputes the module in eager, with other values to save. So the hooks give way
to `torch.utils.checkpoint` around the module's forward, which is traced, and recomputed within the compiled backward.

What the hooks belong to and close over is private, as of torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn
from torch.utils.checkpoint import checkpoint

_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"


def checkpoint_in_forward(model: nn.Module) -> None:
    """Replace the hooks of composable checkpointing, wherever `model` has some, by a checkpoint within the forward."""
    for module in model.modules():
        options = _take_off(module)
        if options is not None:
            forward = vars(module).get("forward")  # somebody's replacement for that of the class
            module.forward = functools.partial(_checkpointed, module, forward, options)


def _take_off(module: nn.Module) -> dict[str, Any] | None:
    """Remove the module's hooks of composable checkpointing; its options, or None if it has no such hooks."""
    options = None
    for key, hook in list(module._forward_pre_hooks.items()):
        if _is_composable(hook):
            options = dict(inspect.getclosurevars(hook).nonlocals)
            del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    for key, hook in list(module._forward_hooks.items()):
        if _is_composable(hook):
            del module._forward_hooks[key], module._forward_hooks_always_called[key]
    if options is not None and (context_fn := options.pop("user_context_fns")) is not None:
        options["context_fn"] = context_fn
    return options


def _is_composable(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) == _COMPOSABLE


def _checkpointed(
    module: nn.Module, forward: Callable[..., Any] | None, options: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """What `module.forward` is from then on. The class may change after that, and its forward with it."""
    run = functools.partial(type(module).forward, module) if forward is None else forward
    return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)
