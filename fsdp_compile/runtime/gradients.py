"""Gradients: what the backward leaves in a shard's leaf becomes the `.grad` of the parameters that the user sees.

A step whose gradients are not reduced (`no_sync`) leaves them, full, in a second leaf, where autograd adds them up. The
next step that reduces takes them along: its compiled backward packs them with its own gradients. What no compiled
backward has taken when autograd is done is reduced then, by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..layout.buckets import Layout
from .collectives import OnAnyRank, reduce_packed, running_alone
from .guard import check_after_backward
from .modules import not_captured
from .views import local_views

if TYPE_CHECKING:
    from .flat_shard import FlatShard


@dataclasses.dataclass(eq=False)
class Accumulation:
    """Full gradients of a bucket that are yet to be reduced.

    Attributes:
        leaf: its `.grad` is a 1-D tensor, `world_size` times as long as the shard, laid out as `fsdp::pack` does; it
            takes no memory itself.
        offsets: of the parameters that have a part in it, on this rank.
        doubtful: of those that may have one on some ranks only; the same on all ranks.
        is_taken: whether the running backward has added it to its own gradients.
    """

    leaf: nn.Parameter
    offsets: set[int] = dataclasses.field(default_factory=set)
    doubtful: set[int] = dataclasses.field(default_factory=set)
    is_taken: bool = False

    @classmethod
    def of(cls, layout: Layout, shard: torch.Tensor) -> Accumulation:
        """Nothing yet, in the dtype of the shard or that of the reduction, if that is wider."""
        dtype = torch.promote_types(shard.dtype, layout.reduce_dtype or shard.dtype)
        one = torch.empty((), dtype=dtype, device=layout.compute_device or shard.device)
        return cls(nn.Parameter(one.expand(layout.shards.size * layout.numel)))

    def moved(self, layout: Layout, shard: torch.Tensor) -> Accumulation:
        """The same for a shard that has moved to another dtype or device."""
        found = Accumulation.of(layout, shard)
        found.offsets, found.doubtful = self.offsets, self.doubtful
        if self.leaf.grad is not None:
            found.leaf.grad = self.leaf.grad.to(found.leaf)
        return found

    def clear(self) -> None:
        self.leaf.grad, self.is_taken = None, False
        self.offsets.clear()
        self.doubtful.clear()


def hand_over_gradients(shard: FlatShard) -> None:
    """Install the hook that hands a shard's gradient over whenever a backward has completed it.

    Autograd holds the hook where the garbage collector does not look, so the hook does not hold the shard.
    """
    reference = weakref.ref(shard)

    def hook(_: torch.Tensor) -> None:
        if (found := reference()) is not None:
            _hand_over(found)

    if shard.data.requires_grad:
        shard.data.register_post_accumulate_grad_hook(hook)


@not_captured
def in_backward() -> bool:
    """Whether autograd is running a backward on this thread (private, as of torch 2.11 to 2.13)."""
    return torch._C._current_graph_task_id() != -1


def shard_of(data: torch.Tensor) -> FlatShard | None:
    """The shard whose leaf `data` is: none where code is traced."""
    return getattr(data, "fsdp_flat_shard", None)


def note_gradients(data: torch.Tensor, offsets: Iterable[int], *, is_kept: bool) -> None:
    """Note which parameters of a shard the running backward computes gradients for; others keep `.grad` as it is.

    Nothing is known of what other ranks' backwards compute where they are not compiled.
    """
    if (shard := shard_of(data)) is not None:
        doubtful = [slot.offset for slot in shard.layout.slots] if is_kept else []
        note_gradients_of(shard, offsets, is_kept=is_kept, doubtful=doubtful)


def note_gradients_of(shard: FlatShard, offsets: Iterable[int], *, is_kept: bool, doubtful: Iterable[int] = ()) -> None:
    """As `note_gradients`; of kept ones, other ranks may have none for those that are `doubtful`."""
    check_after_backward(shard.sharding)
    if is_kept and shard.accumulation is not None:
        shard.accumulation.offsets.update(offsets)
        shard.accumulation.doubtful.update(doubtful)
    elif not is_kept:
        shard.received.update(offsets)
        _reduce_leftovers_after_backward(shard.sharding)


def take_accumulated(shard: FlatShard, accumulated: torch.Tensor) -> torch.Tensor:
    """What a compiled backward is to add to its gradients: `accumulated`, for the first one, or zeros."""
    accumulation = shard.accumulation
    if accumulation is None or accumulation.leaf.grad is None or accumulation.is_taken:
        return torch.zeros_like(accumulated)
    accumulation.is_taken = True
    return accumulated


def _reduce_leftovers_after_backward(sharding: Any) -> None:
    """Have autograd call us at the end of the running backward, if there may be something left to reduce."""
    if not sharding.is_finishing and any(shard.has_accumulated for shard in sharding.shards):
        sharding.is_finishing = True

        def finish() -> None:
            sharding.is_finishing = False
            reduce_leftovers(sharding)

        torch.autograd.Variable._execution_engine.queue_callback(finish)


def reduce_leftovers(sharding: Any) -> None:
    """Reduce what earlier steps kept, by itself."""
    for shard in sharding.shards:
        if shard.has_accumulated:
            _reduce_leftover(shard)


@torch.no_grad()
def _reduce_leftover(shard: FlatShard) -> None:
    accumulation, layout, data = shard.accumulation, shard.layout, shard.data
    assert accumulation is not None and accumulation.leaf.grad is not None
    packed = accumulation.leaf.grad.to(layout.reduce_dtype or layout.param_dtype or data.dtype)
    offsets, doubtful = set(accumulation.offsets), sorted(accumulation.doubtful)
    accumulation.clear()
    axes = layout.shards.size, layout.shards.group, data.dtype, data.device, layout.replicas.size, layout.replicas.group
    what = f"the reduction of gradients of {layout.bucket} that no_sync kept"
    with running_alone(what, shard.sharding.agreement, *layout.groups):
        if doubtful:
            found = OnAnyRank([offset in offsets for offset in doubtful], layout.groups, packed.device).wait()
            offsets.update(itertools.compress(doubtful, found))
        flat = reduce_packed(packed, *axes, layout.reduction.operator, layout.reduction.divisor)
    _give(shard, flat, set(), offsets)


def groups_over(shards: Iterable[FlatShard]) -> list[str]:
    """The process groups along the axes of the ranks that share the gradients of these shards."""
    return list(dict.fromkeys(group for shard in shards for group in shard.layout.groups))


@torch.no_grad()
def _hand_over(shard: FlatShard) -> None:
    flat, shard.data.grad = shard.data.grad, None
    if flat is None:
        return  # autograd also calls hooks of a leaf that takes part and gets no gradient: one whose gradients are kept
    received, shard.received = shard.received, set()
    kept: set[int] = set()
    if shard.accumulation is not None and shard.accumulation.is_taken:
        kept |= shard.accumulation.offsets
        shard.accumulation.clear()
    _give(shard, flat, received, kept)


def _give(shard: FlatShard, flat: torch.Tensor, received: set[int], kept: set[int]) -> None:
    """Views of `flat` to the parameters at these offsets: what a step has kept, to parameters frozen since, too."""
    views = local_views(flat, shard.layout, shard.mesh)
    for slot, view, parameter in zip(shard.layout.slots, views, shard.parameters, strict=True):
        if slot.offset in kept or (slot.offset in received and parameter.requires_grad):
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


def watch_whole(sharding: Any) -> None:
    """With a single rank, before a forward: gradients of whole parameters are divided and checked as those of shards.

    Nothing else sees them. What divides comes before the user's hooks (private, as of torch 2.11 to 2.13).
    """

    def divide(gradient: torch.Tensor) -> torch.Tensor:
        return torch.div(gradient, sharding.divisor)

    def check(_: torch.Tensor) -> None:
        check_after_backward(sharding)

    def is_new(parameter: nn.Parameter, hook: Any) -> bool:
        known = len(sharding.watched)
        sharding.watched.add((id(parameter), hook.__name__))
        return len(sharding.watched) > known

    for _, parameter in sharding.whole.values():
        if not parameter.requires_grad:
            continue
        if sharding.divisor != 1 and is_new(parameter, divide):
            handle = parameter.register_hook(divide)
            parameter._backward_hooks.move_to_end(handle.id, last=False)
        if sharding.checks_gradients and is_new(parameter, check):
            parameter.register_post_accumulate_grad_hook(check)


def carry_hooks(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Register the hooks of an original parameter on the one that takes its place."""
    for hook in (original._backward_hooks or {}).values():
        sharded.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)
