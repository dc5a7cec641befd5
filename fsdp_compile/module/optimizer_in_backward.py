"""Optimizers in the backward: which ones can step there, and what a model then does by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import optim

from ..checks import listed
from ..errors import ConfigError
from ..runtime.local_steps import end_runs, is_elementwise
from ..runtime.muon import is_muon
from ..runtime.optimizers import repoint
from ..runtime.updates import Updates
from .sharding import Sharding, sharding_of

_STATES = {optim.Adagrad: 1, optim.ASGD: 1, optim.RMSprop: 1, optim.SGD: 0}
"""Tensors of a parameter's size that the elementwise optimizers of torch keep for it; others keep two."""


class OptimizerInBackward:
    """Optimizers that step in the backward of a model; see `optimizer_in_backward` of a sharded model.

    Attributes:
        norm: of the gradients that were clipped last: a plain 0-d tensor; None if none were.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._updates: Updates | None = None
        self.norm: torch.Tensor | None = None

    def attach(self, updates: Updates) -> None:
        """They step from now on."""
        self._updates = self._sharding.updates = updates

    def remove(self) -> None:
        """Backwards leave gradients in `.grad` again, and nothing steps in them."""
        sharding = self._sharding
        if self._updates is not None and sharding.updates is self._updates:  # not what was attached since
            sharding.updates = None
            sharding.change_schedule(sharding.schedule.without_updates())


def step_in_backward(
    model: Any, optimizers: object, max_norm: float | None, norm_type: float, scaler: Any
) -> OptimizerInBackward:
    """What `optimizer_in_backward` of a sharded model does; ConfigError before anything is changed."""
    sharding = sharding_of(model)
    found = _optimizers(optimizers)
    _check_arguments(sharding, max_norm, scaler)
    _check_parameters(model, sharding, found)
    handle = OptimizerInBackward(sharding)

    def before_steps() -> None:
        if scaler is not None:
            for optimizer in found:
                scaler.unscale_(optimizer)
        if max_norm is not None:
            handle.norm = model.clip_grad_norm_(max_norm, norm_type)

    def step(optimizer: optim.Optimizer) -> None:
        optimizer.step() if scaler is None else scaler.step(optimizer)

    is_early = max_norm is None and scaler is None
    handle.attach(Updates(found, None if is_early else before_steps, step))
    states = [_num_states(optimizer) for optimizer in found if is_elementwise(optimizer)]
    if is_early and states:
        sharding.change_schedule(dataclasses.replace(sharding.schedule, updates=max(states)))
    return handle


def _check_arguments(sharding: Sharding, max_norm: object, scaler: object) -> None:
    if sharding.updates is not None:
        raise ConfigError("an optimizer steps in the backward of this model already: remove() that first")
    if sharding.checks_gradients:
        raise ConfigError("check_gradients looks at gradients at the end of a backward, which are gone by then")
    if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
        raise ConfigError(f"max_norm is a positive number, not {max_norm!r}")
    if scaler is not None and not (hasattr(scaler, "unscale_") and hasattr(scaler, "step")):
        raise ConfigError(f"scaler is a torch.amp.GradScaler, not {scaler!r}")


def _optimizers(given: object) -> Sequence[optim.Optimizer]:
    """The optimizers, each of which can step in a backward."""
    found = [given] if isinstance(given, optim.Optimizer) else listed("optimizer", given, "optimizers")
    for optimizer in found:
        name = type(optimizer).__name__
        if not isinstance(optimizer, optim.Optimizer):
            raise ConfigError(f"optimizer is one of torch.optim, or several, not {name}")
        if not is_elementwise(optimizer) and not is_muon(optimizer):
            raise ConfigError(
                f"{name} cannot step in the backward: only the optimizers of torch that treat every element by itself "
                "can, which see the parameters of one unit at a time, and torch.optim.Muon"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise ConfigError(f"{name} is differentiable: gradients of its step would lead through the backward")
        if hooks := list(_own_hooks(optimizer)):
            raise ConfigError(
                f"{name} has hooks of its step ({', '.join(map(str, hooks))}): in the backward it has no one step "
                "that they could be called before or after"
            )
    return found


def _own_hooks(optimizer: optim.Optimizer) -> Iterator[object]:
    """The hooks of its step that the user has registered (private, as of torch 2.11 to 2.15)."""
    of_step: Any = optimizer
    for hook in (*of_step._optimizer_step_pre_hooks.values(), *of_step._optimizer_step_post_hooks.values()):
        if hook is not end_runs:
            yield getattr(hook, "__qualname__", hook)


def _check_parameters(model: nn.Module, sharding: Sharding, optimizers: Iterable[optim.Optimizer]) -> None:
    """Raise ConfigError for parameters whose gradients are not complete when a backward of the model ends."""
    own = {parameter for shard in sharding.shards for parameter in shard.parameters}
    own |= {parameter for _, parameter in sharding.whole.values()}
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    seen: set[nn.Parameter] = set()
    for optimizer in optimizers:
        repoint(optimizer)
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            name = name_of.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            if parameter not in own:
                kind = "is ignored by the sharded model" if parameter in name_of else "is not one of the model"
                raise ConfigError(f"{name} {kind}: its gradient may not be complete when the backward ends")
            if parameter in seen:
                raise ConfigError(f"{name} is in two of the optimizers")
            seen.add(parameter)


def _num_states(optimizer: optim.Optimizer) -> int:
    """Tensors of a parameter's size that an elementwise optimizer keeps for it."""
    flags = ("amsgrad", "momentum", "centered")
    more = [sum(bool(group.get(flag)) for flag in flags) for group in optimizer.param_groups]
    return _STATES.get(type(optimizer), 2) + max(more, default=0)
