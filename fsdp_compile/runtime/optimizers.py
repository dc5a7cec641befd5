"""Optimizers that were built before the model was sharded: they train the sharded parameters, or they raise."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

_REPLACEMENT = "fsdp_replacement"


def note_replacement(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Remember, on the original parameter, which sharded one took its place."""
    _install_hook()
    setattr(original, _REPLACEMENT, sharded)


@functools.cache
def _install_hook() -> None:
    register_optimizer_step_pre_hook(_repoint)


def _repoint(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step: put the sharded parameters in the place of the originals.

    Raises:
        RuntimeError: the optimizer has state for an original, whose values cannot be carried over.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            sharded = getattr(parameter, _REPLACEMENT, None)
            if sharded is None:
                continue
            if optimizer.state.get(parameter):
                raise RuntimeError(
                    f"{type(optimizer).__name__} has state for a parameter of shape {tuple(parameter.shape)} that was "
                    "sharded since, which cannot be carried over: build the optimizer after sharding the model"
                )
            group["params"][index] = sharded
