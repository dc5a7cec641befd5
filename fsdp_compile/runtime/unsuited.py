"""Optimizers that cannot train DTensors say so in a sentence, instead of failing somewhere inside.

Optimizers that are neither torch's elementwise ones nor Muon compute with DTensors. Where that cannot be done, DTensor
raises an error about an operator. It is raised again with the name of the optimizer and what to do.

Private torch API, as of torch 2.11 to 2.15: `Optimizer.profile_hook_step` makes of a class's `step` a function that
calls the hooks, and then the variable `func` of its closure.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import optim
from torch.distributed.tensor import DTensor

from .local_steps import is_elementwise

_REASONS = {
    "got mixed torch.Tensor and DTensor": "it computes with plain tensors and parts of sharded ones together, as those "
    "of states that it makes by torch.zeros(shape)",
    "in-place operations that require placement changes": "it changes in place what ranks have yet to add up",
    "Cannot flatten unevenly sharded tensor": "it flattens parameters of which ranks hold different numbers of rows",
}
"""By what DTensor says, as of torch 2.11 to 2.15."""

_INSTEAD = (
    "use torch.optim.AdamW or another one of torch that treats every element by itself, or torch.optim.Muon; in one of "
    "your own, make states of a parameter's shape with torch.zeros_like(parameter), and compute others from "
    "parameter.full_tensor(). The step has ended before it was complete"
)


def explain_failures(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step: see that what DTensor cannot do in it is told as what the optimizer cannot do."""
    if is_elementwise(optimizer):
        return
    step: Any = type(optimizer).step
    names = step.__code__.co_freevars if inspect.isfunction(step) else ()
    cell = dict(zip(names, getattr(step, "__closure__", None) or (), strict=True)).get("func")
    if cell is not None and not vars(cell.cell_contents).get("fsdp_explains"):
        cell.cell_contents = _explained(cell.cell_contents)  # also for the step that is about to begin


def _explained(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def explained(optimizer: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(optimizer, *args, **kwargs)
        except RuntimeError as e:
            reason = next((reason for text, reason in _REASONS.items() if text in str(e)), None)
            if reason is None or not _has_dtensors(optimizer):
                raise
            kind = type(optimizer)
            name = f"{kind.__module__}.{kind.__qualname__}"
            raise RuntimeError(f"{name} cannot train these sharded parameters: {reason}; {_INSTEAD}") from e

    vars(explained)["fsdp_explains"] = True
    return explained


def _has_dtensors(optimizer: optim.Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])
