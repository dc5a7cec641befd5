"""Optimizers: those from before the model was sharded train its shards, or raise; those of torch are fast.

Those of torch that treat every element by itself compute with this rank's parts of parameters, gradients and states as
plain tensors: the same values as with DTensors, whose dispatch in Python takes most of a step of many small layers, and
on a GPU in the few kernels that torch has for lists of plain tensors. What users see, states included, are DTensors.
Private torch API, as of torch 2.11 to 2.13: `_init_group`, with which these optimizers collect what a step works on.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import torch
import torch.nn as nn
from torch import optim
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .views import laid_out_as, local_tensor

_REPLACEMENT = "fsdp_replacement"
_ELEMENTWISE = {
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
}


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What took the place of a parameter: a sharded one, and the `fsdp_compile.reading.Read` of it."""

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
    """Have every optimizer come by here before and after its steps."""
    register_optimizer_step_pre_hook(_repoint)
    register_optimizer_step_pre_hook(_compute_locally)
    register_optimizer_step_post_hook(_collect_states)


def _repoint(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step: put the sharded parameters in the place of the originals.

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


def _compute_locally(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step: see that an optimizer that treats every element by itself gets plain tensors."""
    _collect_states(optimizer, args, kwargs)  # of a step that ended in an exception
    if type(optimizer) not in _ELEMENTWISE or "_init_group" in vars(optimizer):
        return
    reference = weakref.ref(optimizer)

    def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        found: Any = reference()
        result = type(found)._init_group(found, group, *lists)
        # Dynamo, which traces with what this returns, would take the gradients of now for those of later steps.
        if not group["differentiable"] and TracingContext.try_get() is None:
            found._fsdp_parameters |= _localize(lists)
        return result

    # Neither is pickled or copied with an optimizer.
    vars(optimizer).update(_init_group=init_group, _fsdp_parameters={})


def _localize(lists: tuple[list[Any], ...]) -> dict[torch.Tensor, torch.Tensor]:
    """Replace DTensors by this rank's parts, unless that of a gradient or a state is not that of its parameter.

    Args:
        lists: parameters, their gradients, and their states of each kind; a list is empty if there are none.

    Returns:
        The parameters of their parts.
    """
    filled = [values for values in lists if values]
    if not all(_is_sharded_alike(*values) for values in zip(*filled, strict=True)):
        return {}
    parameters = [parameter for parameter in lists[0] if isinstance(parameter, DTensor)]
    for values in filled:
        values[:] = [local_tensor(value) if isinstance(value, DTensor) else value for value in values]
    return {local_tensor(parameter): parameter for parameter in parameters}


def _is_sharded_alike(parameter: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether this rank's part of each of the others belongs to its part of the parameter; that of a number does."""
    if not isinstance(parameter, DTensor):
        return not any(isinstance(other, DTensor) for other in others)
    spec = parameter._spec
    for other in others:
        if isinstance(other, DTensor):
            if other._spec is not spec and (other.placements != spec.placements or other.device_mesh != spec.mesh):
                return False
        elif other is not None and other.dim():
            return False
    return True


def _collect_states(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After every step: SGD notes momentum as the state of what it was given, and it is the parameter's."""
    for local, parameter in vars(optimizer).get("_fsdp_parameters", {}).items():
        for name, state in optimizer.state.pop(local, {}).items():
            if state is not None and optimizer.state[parameter].get(name) is None:
                optimizer.state[parameter][name] = laid_out_as(parameter, state)
    vars(optimizer).get("_fsdp_parameters", {}).clear()
