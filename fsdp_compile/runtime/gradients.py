"""Gradients: what the backward leaves in a shard's leaf becomes the `.grad` of the parameters that the user sees.

A step whose gradients are not reduced (`no_sync`) leaves them, full, in a second leaf, where autograd adds them up. The
next step that reduces takes them along: its compiled backward packs them with its own gradients. What no compiled
backward has taken when autograd is done is reduced then, by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
import torch.nn as nn

from .collectives import OnAnyRank, reduce_packed, running_alone
from .flat_shard import Divisor, FlatShard, Shards
from .gathered_once import end_step
from .guard import check_after_backward
from .modules import not_captured
from .updates import step_after_backward


@not_captured
def in_backward() -> bool:
    """Whether autograd is running a backward on this thread (private, as of torch 2.11 to 2.15)."""
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
    assert shard.sharding is not None
    check_after_backward(shard.sharding)
    if is_kept and shard.accumulation is not None:
        shard.accumulation.offsets.update(offsets)
        shard.accumulation.doubtful.update(doubtful)
        if shard.is_kept_by_user and not shard.keeps_gradients:  # said between the forward and this
            _reduce_leftovers_after_backward(shard.sharding)
    elif not is_kept:
        step_after_backward(shard.sharding)
        if not shard.sharding.is_step_over:
            shard.sharding.is_step_over = True
            end_step(shard.sharding.shards)
        shard.received.update(offsets)
        _reduce_leftovers_after_backward(shard.sharding)


def take_accumulated(shard: FlatShard, accumulated: torch.Tensor) -> torch.Tensor:
    """What a compiled backward is to add to its gradients: `accumulated`, for the first one, or zeros."""
    accumulation = shard.accumulation
    if accumulation is None or accumulation.leaf.grad is None or accumulation.is_taken:
        return torch.zeros_like(accumulated)
    accumulation.is_taken = True
    return accumulated


def _reduce_leftovers_after_backward(sharding: Shards) -> None:
    """Have autograd call us at the end of the running backward, if there may be something left to reduce."""
    kept = [shard for shard in sharding.shards if shard.accumulation is not None or shard.is_kept_by_user]
    if not sharding.is_finishing and any(_may_be_left(shard) for shard in kept):
        sharding.is_finishing = True

        def finish() -> None:
            sharding.is_finishing = False
            step_after_backward(sharding)
            reduce_leftovers(sharding)

        torch.autograd.Variable._execution_engine.queue_callback(finish)


def _may_be_left(shard: FlatShard) -> bool:
    """Whether there are gradients to reduce, or the running backward will keep some that are."""
    return not shard.keeps_gradients and (shard.has_accumulated or shard.is_kept_by_user)


def reduce_leftovers(sharding: Shards) -> None:
    """Reduce what earlier steps kept, by itself, except for what is to be kept on."""
    for shard in sharding.shards:
        if shard.has_accumulated and not shard.keeps_gradients:
            _reduce_leftover(shard)
    end_step(sharding.shards)


@torch.no_grad()
def _reduce_leftover(shard: FlatShard) -> None:
    accumulation, layout, data = shard.accumulation, shard.layout, shard.data
    assert accumulation is not None and accumulation.leaf.grad is not None
    param_dtype, reduce_dtype = layout.casts
    packed = accumulation.leaf.grad.to(reduce_dtype or param_dtype or data.dtype)
    offsets, doubtful = set(accumulation.offsets), sorted(accumulation.doubtful)
    accumulation.clear()
    axes = layout.shards.size, layout.shards.group, data.dtype, data.device, layout.replicas.size, layout.replicas.group
    what = f"the reduction of gradients of {layout.bucket} that no_sync kept"
    with running_alone(what, shard.agreement, *layout.groups):
        if doubtful:
            found = OnAnyRank([offset in offsets for offset in doubtful], layout.groups, packed.device).wait()
            offsets.update(itertools.compress(doubtful, found))
        residual = shard.known_residual() if layout.feeds_back else None
        reduction, (regions, of_replicas) = layout.reduction, layout.reduced_regions(packed.dtype)
        flat = reduce_packed(packed, *axes, reduction.operator, reduction.divisor, regions, residual, of_replicas)
    shard.give(flat, set(), offsets)


def groups_over(shards: Iterable[FlatShard]) -> list[str]:
    """The process groups along the axes of the ranks that share the gradients of these shards."""
    return list(dict.fromkeys(group for shard in shards for group in shard.layout.groups))


def watch_whole(sharding: Shards) -> None:
    """With a single rank, before a forward: whole parameters are divided, checked and updated as those of shards are.

    Nothing else sees their gradients. What divides comes before the user's hooks (private, as of torch 2.11 to 2.15).
    """

    def is_new(parameter: nn.Parameter, hook: str) -> bool:
        known = len(sharding.watched)
        sharding.watched.add((id(parameter), hook))
        return len(sharding.watched) > known

    for _, parameter in sharding.whole.values():
        if not parameter.requires_grad:
            continue
        divisor = sharding.divisors.get(parameter)
        if divisor is not None and divisor.value != 1 and is_new(parameter, "divide"):
            handle = parameter.register_hook(_dividing(divisor))
            parameter._backward_hooks.move_to_end(handle.id, last=False)  # type: ignore[union-attr]
        if sharding.checks_gradients and is_new(parameter, "check"):
            parameter.register_post_accumulate_grad_hook(lambda _: check_after_backward(sharding))
        if sharding.updates is not None and is_new(parameter, "step"):
            parameter.register_post_accumulate_grad_hook(lambda _: _step_whole(sharding))


def _dividing(divisor: Divisor) -> Callable[[torch.Tensor], torch.Tensor]:
    def divide(gradient: torch.Tensor) -> torch.Tensor:
        return torch.div(gradient, divisor.value)

    return divide


def _step_whole(sharding: Shards) -> None:
    if sharding.updates is not None and not sharding.updates.is_kept:
        step_after_backward(sharding)


def carry_hooks(original: nn.Parameter, sharded: nn.Parameter) -> None:
    """Register the hooks of an original parameter on the one that takes its place."""
    for hook in (original._backward_hooks or {}).values():
        sharded.register_hook(hook)
    for hook in (original._post_accumulate_grad_hooks or {}).values():
        sharded.register_post_accumulate_grad_hook(hook)
