"""Gradients: what the backward leaves in a shard's leaf becomes the `.grad` of the parameters that the user sees."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .flat_shard import FlatShard, local_view


def hand_over_gradients(shard: FlatShard, mesh: DeviceMesh) -> None:
    """Install the hook that hands a shard's gradient over whenever a backward has completed it."""
    if shard.layout.requires_grad:
        shard.data.register_post_accumulate_grad_hook(lambda _: _hand_over(shard, mesh))


def note_received(data: torch.Tensor, offsets: Iterable[int]) -> None:
    """Note which parameters of a shard the running backward computes gradients for; others keep `.grad` as it is.

    `data` is a shard's leaf when code runs, and something else when it is traced, where there is nothing to note.
    """
    shard = getattr(data, "fsdp_flat_shard", None)
    if shard is not None:
        shard.received.update(offsets)


@torch.no_grad()
def _hand_over(shard: FlatShard, mesh: DeviceMesh) -> None:
    flat, shard.data.grad = shard.data.grad, None
    received, shard.received = shard.received, set()
    assert flat is not None
    for slot, parameter in zip(shard.layout.slots, shard.parameters, strict=True):
        if slot.offset in received and parameter.requires_grad:
            view = local_view(flat, shard.layout, slot, mesh)
            _accumulate(parameter, DTensor(view, parameter._spec, requires_grad=False))  # type: ignore[attr-defined]


def _accumulate(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    """What autograd does at a leaf, for one it never sees: gradient hooks, accumulation, hooks after it.

    The hooks' attributes are private, as of torch 2.11 to 2.13.
    """
    for hook in (parameter._backward_hooks or {}).values():
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)
