"""Collectives that run outside of compiled graphs, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed._functional_collectives

from ..passes import forms
from .agreement import Agreement
from .places import at, outside_of_graphs

_c10d = torch.ops._c10d_functional  # private, as of torch 2.11 to 2.15


def running_alone(what: str, agreement: Agreement | None, *groups: str, same: str = "") -> AbstractContextManager[None]:
    """Around collectives that are a place of their own: what they are, and the names of their process groups.

    Args:
        same: what has to be the same on all ranks besides.

    Raises:
        RankError: other ranks do not run them; every rank raises it.
    """
    place = outside_of_graphs(what, *groups, same=same)
    return at(place) if agreement is None or not groups else agreement.running(place=place)


def all_reduce_alone(
    what: str, tensor: torch.Tensor, operator: str, group: str, agreement: Agreement | None
) -> torch.Tensor:
    """Over the ranks of the process group of this name."""
    with running_alone(what, agreement, group):
        reduced: torch.Tensor = _c10d.wait_tensor(_c10d.all_reduce(tensor, operator, group))
    return reduced


def start_gathers(chunks: Sequence[torch.Tensor], world_size: int, group: str) -> list[torch.Tensor]:
    """Start to gather several chunks in one call; `wait` before what all ranks have of one is read."""
    started: list[torch.Tensor] = _c10d.all_gather_into_tensor_coalesced(list(chunks), world_size, group)
    return started


def all_to_all(packed: torch.Tensor, num_received: Sequence[int], num_sent: Sequence[int], group: str) -> torch.Tensor:
    """Start to exchange elements of a 1-D tensor, so many from and to each rank; `wait` before the result is read."""
    received: torch.Tensor = _c10d.all_to_all_single(packed, list(num_received), list(num_sent), group)
    return received


def wait(pending: torch.Tensor) -> torch.Tensor:
    """The result of a collective that was started before."""
    received: torch.Tensor = _c10d.wait_tensor(pending)
    return received


def gather_chunk(chunk: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    """All ranks' chunks of a parameter, one after another."""
    return wait(_c10d.all_gather_into_tensor(chunk.contiguous(), world_size, group))


def reduce_packed(
    packed: torch.Tensor,
    world_size: int,
    group: str,
    dtype: torch.dtype,
    device: torch.device,
    replicas: int,
    replica_group: str,
    reduction: str,
    divisor: float,
    regions: Sequence[forms.Region] = (),
    residual: torch.Tensor | None = None,
    regions_of_replicas: Sequence[forms.Region] = (),
) -> torch.Tensor:
    """The gradient of a shard from a bucket's packed gradients, reduced over both axes in the dtype they have.

    Args:
        regions: the forms in which each rank's part is sent, if ranks send each other their gradients.
        residual: what earlier messages have lost of gradients; it becomes what this one loses.
        regions_of_replicas: the forms in which replicas send each other their sums, if they do.
    """
    if world_size > 1 and regions:
        packed = _summed_up(packed, world_size, group, reduction, regions, residual)
    elif world_size > 1:
        packed = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(packed, reduction, world_size, group))
    if replicas > 1 and regions_of_replicas:
        message = _message(packed.view(1, -1), regions_of_replicas, None)
        received = gather_chunk(message.view(-1), replicas, replica_group).view(replicas, -1)
        packed = _sum_of(received, packed, packed.numel(), reduction, regions_of_replicas)
    elif replicas > 1:
        packed = _c10d.wait_tensor(_c10d.all_reduce(packed, reduction, replica_group))
    return (packed.to(dtype) / divisor if divisor != 1 else packed.to(dtype)).to(device)


def _summed_up(
    packed: torch.Tensor,
    world_size: int,
    group: str,
    reduction: str,
    regions: Sequence[forms.Region],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """What `fsdp::sum_up` computes, from what all ranks send each other."""
    by_rank, numel = packed.view(world_size, -1), packed.numel() // world_size
    lost = None if residual is None else residual.data.view(world_size, -1)
    message = _message(by_rank, regions, lost)
    part = [message.shape[1]] * world_size
    received = wait(all_to_all(message.view(-1), part, part, group)).view(world_size, -1)
    return _sum_of(received, packed, numel, reduction, regions)


def _message(by_rank: torch.Tensor, regions: Sequence[forms.Region], lost: torch.Tensor | None) -> torch.Tensor:
    """What is sent to each rank, as bytes, with what earlier messages have lost of it: a row for each."""

    def of(value: torch.Tensor, region: forms.Region) -> torch.Tensor:
        return value[:, region.begin : region.end]

    sent = [
        piece
        for region in regions
        for piece in _message_of_region(of(by_rank, region), region, None if lost is None else of(lost, region))
    ]
    return torch.cat([each.contiguous().view(forms.MESSAGE) for each in sent], 1)


def _sum_of(
    received: torch.Tensor, like: torch.Tensor, numel: int, reduction: str, regions: Sequence[forms.Region]
) -> torch.Tensor:
    """The sum, or the mean, of what ranks have sent of elements like these, one rank's bytes in each row."""
    dtype, world_size = torch.promote_types(like.dtype, torch.float32), len(received)
    total = like.new_zeros(numel, dtype=dtype)
    for region, piece in zip(regions, received.split([region.num_bytes for region in regions], 1), strict=True):
        values = piece if forms.is_integers(region.form) else piece.contiguous().view(forms.dtype_of_name(region.form))
        summed = forms.out_of_form(forms.eagerly, values, [world_size], region, dtype).sum(0)
        total[region.begin : region.end] = summed
    return total / world_size if reduction == "avg" else total


def _message_of_region(value: torch.Tensor, region: forms.Region, lost: torch.Tensor | None) -> list[torch.Tensor]:
    """The parts of what is sent of a region to every rank, with what earlier messages have lost of it."""
    lead = [value.shape[0]]
    if lost is None or not forms.is_integers(region.form):
        return forms.into_form(forms.eagerly, value, lead, region, value.dtype)
    wide = torch.promote_types(value.dtype, torch.float32)
    blocks = forms.Blocks.of(forms.eagerly, value.to(wide) + lost.to(wide), lead, region, wide)
    lost.copy_(forms.lost_of(forms.eagerly, blocks))
    return forms.message_of(forms.eagerly, blocks)


class OnAnyRank:
    """Whether something is so on any of several ranks, for a list of such things; it starts with the object.

    Attributes:
        groups: names of the process groups along the axes of the ranks, one after another.
    """

    def __init__(self, is_here: Sequence[bool], groups: Sequence[str], device: torch.device) -> None:
        self._num_ranks = torch.tensor(is_here, dtype=torch.int32, device=device)
        self._first, *self._others = groups
        self._pending = _c10d.all_reduce(self._num_ranks, "sum", self._first)

    def wait(self) -> list[bool]:
        """What is so on any of the ranks."""
        found = _c10d.wait_tensor(self._pending)
        for group in self._others:
            found = _c10d.wait_tensor(_c10d.all_reduce(found, "sum", group))
        return (found > 0).tolist()  # type: ignore[no-any-return]
