"""Gradients: what the backward leaves in a shard's leaf becomes the `.grad` of the parameters that the user sees."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .views import local_view

if TYPE_CHECKING:
    from .flat_shard import FlatShard


def hand_over_gradients(shard: FlatShard) -> None:
    """Install the hook that hands a shard's gradient over whenever a backward has completed it.

    Autograd holds the hook where the garbage collector does not look, so the hook does not hold the shard.
    """
    reference = weakref.ref(shard)

    def hook(_: torch.Tensor) -> None:
        if (found := reference()) is not None:
            _hand_over(found)

    if shard.layout.requires_grad:
        shard.data.register_post_accumulate_grad_hook(hook)


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread (private, as of torch 2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def note_received(data: torch.Tensor, offsets: Iterable[int]) -> None:
    """Note which parameters of a shard the running backward computes gradients for; others keep `.grad` as it is.

    `data` is a shard's leaf when code runs, and something else when it is traced, where there is nothing to note.
    """
    shard = getattr(data, "fsdp_flat_shard", None)
    if shard is not None:
        shard.received.update(offsets)


@torch.no_grad()
def _hand_over(shard: FlatShard) -> None:
    flat, shard.data.grad = shard.data.grad, None
    received, shard.received = shard.received, set()
    assert flat is not None
    for slot, parameter in zip(shard.layout.slots, shard.parameters, strict=True):
        if slot.offset in received and parameter.requires_grad:
            view = local_view(flat, shard.layout, slot, shard.mesh)
            _accumulate(parameter, DTensor(view, parameter._spec, requires_grad=False))  # type: ignore[attr-defined]


def _accumulate(parameter: nn.Parameter, gradient: torch.Tensor) -> None:
    """What autograd does at a leaf, for one it never sees: gradient hooks, accumulation, hooks after it.

    The hooks' attributes are private, as of torch 2.11 to 2.13.
    """
    for hook in list((parameter._backward_hooks or {}).values()):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def carry_hooks(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Register the hooks of an original parameter on the one that takes its place."""
    for hook in (original._backward_hooks or {}).values():
        sharded.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)
