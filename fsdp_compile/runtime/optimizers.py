"""Optimizers: those from before the model was sharded train its shards, or raise; every one comes by here."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch.nn as nn
from torch import optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .local_steps import compute_locally
from .muon import step_by_owners
from .rows import refuse_states_of_others
from .unsuited import explain_failures

_REPLACEMENT = "fsdp_replacement"


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What took the place of a parameter: a sharded one, and the `fsdp_compile.module.reading.Read` of it."""

    sharded: nn.Parameter
    read: Any


def note_replacement(original: nn.Parameter, sharded: nn.Parameter, read: Any) -> None:
    """Remember, on the original parameter, what took its place."""
    install_hooks()
    setattr(original, _REPLACEMENT, Replacement(sharded, read))


def replacement_of(original: nn.Parameter) -> Replacement | None:
    """What took the place of `original`, if something did."""
    return getattr(original, _REPLACEMENT, None)


@functools.cache
def install_hooks() -> None:
    """Have every optimizer come by here before its steps."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: repoint(optimizer))
    register_optimizer_step_pre_hook(refuse_states_of_others)
    register_optimizer_step_pre_hook(compute_locally)
    register_optimizer_step_pre_hook(step_by_owners)
    register_optimizer_step_pre_hook(explain_failures)
    register_optimizer_step_pre_hook(_count)


_num_steps = 0


def num_steps() -> int:
    """How many steps optimizers of sharded parameters have begun in this process."""
    return _num_steps


def _count(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Optimizers of other parameters do not count: a rank may have one by itself."""
    global _num_steps
    _num_steps += any(isinstance(each, DTensor) for group in optimizer.param_groups for each in group["params"])


def repoint(optimizer: optim.Optimizer) -> None:
    """Put the sharded parameters in the place of the originals. It happens before every step, but may be due earlier.

    Loading a state and clipping look at what the optimizer lists, too.

    Raises:
        RuntimeError: the optimizer has state for an original, whose values cannot be carried over.
    """
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            replacement = replacement_of(parameter)
            if replacement is None:
                continue
            if optimizer.state.get(parameter):
                raise RuntimeError(
                    f"{type(optimizer).__name__} has state for a parameter of shape {tuple(parameter.shape)} that was "
                    "sharded since, which cannot be carried over: build the optimizer after sharding the model"
                )
            group["params"][index] = replacement.sharded
