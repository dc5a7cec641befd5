"""torch.optim.Muon on sharded matrices: each has an owner, the rank that orthogonalizes its update for all.

Newton-Schulz needs whole matrices. The momentum treats every element by itself, and stays where its parameter is. What
follows from it travels to the owner in the dtype that Newton-Schulz begins with, the orthogonal matrix travels back,
and each rank updates its part of the parameter: the numbers of torch's own step. While the owners compute the matrices
of one batch, those of the next one are on their way.

Private torch API, as of torch 2.11 to 2.15: what a step of Muon computes (checked on 2.13). If its options, or those of
Newton-Schulz, are others than those known here, torch computes with DTensors.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim.optimizer import _to_scalar

from .agreement import agreement_of
from .collectives import all_to_all, running_alone, wait
from .gloo import overlapping_group
from .local_steps import after_init_group, is_sharded_alike
from .views import local_tensor

try:
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
except ImportError:  # a torch without Muon, or with another one
    _zeropower_via_newtonschulz = None  # type: ignore[assignment]

_OPTIONS = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
_ARGUMENTS = ["grad", "ns_coefficients", "ns_steps", "eps"]

_DTYPE = torch.bfloat16
"""What Newton-Schulz begins and ends with."""

_BATCH_COST = 3 * 2**30
"""Of the matrices of a rank in one batch, at least: that of 1024 x 1024. Less is not worth a message of its own."""

_Row = tuple[Any, Any, Any]
"""A parameter, its gradient and its momentum, as DTensors of one placement."""

_Owners = Sequence[Sequence[int]]
"""For each rank, the indices of the matrices that it owns."""


def step_by_owners(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before every step: see that torch.optim.Muon orthogonalizes sharded matrices on one rank each."""
    if is_muon(optimizer) and "_init_group" not in vars(optimizer):
        after_init_group(optimizer, _step_sharded)


def is_muon(optimizer: optim.Optimizer) -> bool:
    """Whether it is torch.optim.Muon, as it is known here."""
    if _zeropower_via_newtonschulz is None or type(optimizer) is not optim.Muon:
        return False
    arguments = inspect.signature(_zeropower_via_newtonschulz).parameters
    options = optimizer.defaults.keys() - {"differentiable"}  # which loading a state adds
    return list(arguments) == _ARGUMENTS and options == _OPTIONS


def _step_sharded(optimizer: optim.Optimizer, group: dict[str, Any], lists: Sequence[list[Any]]) -> None:
    """Update sharded matrices here, and leave the others of the lists to torch, with plain tensors where it can be."""
    left: list[_Row] = []
    sharded: dict[tuple[DeviceMesh, int], list[_Row]] = {}
    for row in zip(*lists, strict=True):
        axes = _axes_of(*row)
        if axes is None:
            left.append(row)
        elif not axes:
            left.append(tuple(map(local_tensor, row)))  # type: ignore[arg-type]
        else:
            sharded.setdefault((row[0].device_mesh, axes[0]), []).append(row)
    for (mesh, axis), rows in sharded.items():
        _Step(rows, _Ranks.along(mesh, axis), group).run()
    for index, values in enumerate(lists):
        values[:] = [row[index] for row in left]


def _axes_of(parameter: Any, gradient: Any, momentum: Any) -> list[int] | None:
    """The mesh axis that a parameter is sharded over, if there is one; None where DTensor has to find out."""
    if not isinstance(parameter, DTensor) or not is_sharded_alike(parameter, gradient, momentum):
        return None
    mesh = parameter.device_mesh
    placements = [(axis, placement) for axis, placement in enumerate(parameter.placements) if mesh.size(axis) > 1]
    axes = [axis for axis, placement in placements if not placement.is_replicate()]
    is_plain = all(placement.is_replicate() or type(placement) is Shard for _, placement in placements)
    return axes if is_plain and len(axes) <= 1 else None


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """Those along an axis of a mesh, which hold the parts of a matrix.

    Attributes:
        rank: this one, among them.
        group: the name of their process group.
        device: where they communicate, and compute; parts that were offloaded are elsewhere.
    """

    mesh: DeviceMesh
    axis: int
    size: int
    rank: int
    group: str
    device: torch.device

    @classmethod
    def along(cls, mesh: DeviceMesh, axis: int) -> _Ranks:
        group = overlapping_group(mesh.get_group(axis), mesh.device_type)
        rank, device = mesh.get_local_rank(axis), torch.device(mesh.device_type)
        return cls(mesh, axis, mesh.size(axis), rank, str(group.group_name), device)


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A parameter, as all ranks know it: its dimension `dim` is sharded."""

    shape: torch.Size
    dim: int

    @classmethod
    def of(cls, parameter: DTensor, axis: int) -> _Matrix:
        placement: Any = parameter.placements[axis]
        return cls(parameter.shape, placement.dim % parameter.ndim)

    def lengths(self, size: int) -> list[int]:
        """How much of the sharded dimension each rank holds."""
        length = self.shape[self.dim]
        most = -(-length // size)
        return [max(0, min(most, length - rank * most)) for rank in range(size)]

    def part(self, size: int, rank: int) -> torch.Size:
        """The shape of a rank's part."""
        shape = list(self.shape)
        shape[self.dim] = self.lengths(size)[rank]
        return torch.Size(shape)


class _Step:
    """A step of the matrices of one group of parameters that are sharded over the same ranks."""

    def __init__(self, rows: Sequence[_Row], ranks: _Ranks, group: dict[str, Any]) -> None:
        self._ranks = ranks
        matrices = [_Matrix.of(parameter, ranks.axis) for parameter, *_ in rows]
        self._same = "\n".join(f"{tuple(matrix.shape)} {matrix.dim}" for matrix in matrices)
        batches = batches_of(tuple(tuple(matrix.shape) for matrix in matrices), ranks.size)
        self._batches = [_Batch(rows, matrices, owners, ranks, group) for owners in batches]

    def run(self) -> None:
        """Start the messages of each batch before the one ahead of it is computed, and use them after the next one."""
        what = f"the step of torch.optim.Muon of {len(self._same.splitlines())} matrices"
        with running_alone(what, agreement_of(self._ranks.mesh), self._ranks.group, same=self._same):
            self._batches[0].send_updates()
            for number, batch in enumerate(self._batches):
                if number + 1 < len(self._batches):
                    self._batches[number + 1].send_updates()
                batch.orthogonalize()
                if number > 0:
                    self._batches[number - 1].apply()
            self._batches[-1].apply()


class _Batch:
    """Matrices that travel together, to their owners and back."""

    def __init__(
        self,
        rows: Sequence[_Row],
        matrices: Sequence[_Matrix],
        owners: _Owners,
        ranks: _Ranks,
        group: dict[str, Any],
    ) -> None:
        self._ranks, self._group = ranks, group
        in_order = [index for owned in owners for index in owned]
        self._rows, self._matrices = [rows[index] for index in in_order], [matrices[index] for index in in_order]
        self._owned = [matrices[index] for index in owners[ranks.rank]]
        self._num_of_owner = [
            sum(matrices[index].part(ranks.size, ranks.rank).numel() for index in owned) for owned in owners
        ]
        self._num_of_holder = [
            sum(matrix.part(ranks.size, rank).numel() for matrix in self._owned) for rank in range(ranks.size)
        ]

    def send_updates(self) -> None:
        """Update the momentum, and start to send what follows from it to the owners."""
        packed = _packed((self._update(*map(local_tensor, row)) for row in self._rows), self._ranks.device)
        self._pending = all_to_all(packed, self._num_of_holder, self._num_of_owner, self._ranks.group)

    def _update(self, parameter: Tensor, gradient: Tensor, momentum: Tensor) -> Tensor:
        weight = self._group["momentum"]
        momentum.lerp_(gradient, 1 - weight)
        return gradient.lerp(momentum, weight) if self._group["nesterov"] else momentum

    def orthogonalize(self) -> None:
        """Of the matrices that this rank owns, start to send every rank its part."""
        parts_of_rank: list[list[Tensor]] = [[] for _ in range(self._ranks.size)]
        for matrix, whole in zip(self._owned, self._received(), strict=True):
            orthogonal = _zeropower_via_newtonschulz(
                whole, self._group["ns_coefficients"], self._group["ns_steps"], self._group["eps"]
            )
            parts = orthogonal.split(matrix.lengths(self._ranks.size), matrix.dim)
            for found, part in zip(parts_of_rank, parts, strict=True):
                found.append(part)
        packed = _packed((part for parts in parts_of_rank for part in parts), self._ranks.device)
        self._pending = all_to_all(packed, self._num_of_owner, self._num_of_holder, self._ranks.group)

    def _received(self) -> Iterator[Tensor]:
        """The matrices that this rank owns, one after another."""
        size = self._ranks.size
        rows = wait(self._pending).split(self._num_of_holder)
        parts_of_rank = [
            _unpacked(row, [matrix.part(size, rank) for matrix in self._owned]) for rank, row in enumerate(rows)
        ]
        for matrix, parts in zip(self._owned, zip(*parts_of_rank, strict=True), strict=True):
            yield torch.cat(parts, matrix.dim)

    def apply(self) -> None:
        """Update this rank's parts of the parameters."""
        lr, weight_decay = _to_scalar(self._group["lr"]), self._group["weight_decay"]
        shapes = [matrix.part(self._ranks.size, self._ranks.rank) for matrix in self._matrices]
        parts = _unpacked(wait(self._pending), shapes)
        for (parameter, *_), matrix, part in zip(self._rows, self._matrices, parts, strict=True):
            local = local_tensor(parameter)
            local.mul_(1 - lr * weight_decay)
            rate = _adjust_lr(lr, self._group["adjust_lr_fn"], matrix.shape)
            local.add_(part.to(local.device), alpha=-rate)
        del self._pending


def _packed(parts: Iterator[Tensor], device: torch.device) -> Tensor:
    return torch.cat(
        [torch.empty(0, dtype=_DTYPE, device=device), *(part.to(device, _DTYPE).flatten() for part in parts)]
    )


def _unpacked(packed: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = packed.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@functools.lru_cache
def batches_of(shapes: tuple[tuple[int, ...], ...], num_ranks: int) -> tuple[_Owners, ...]:
    """Who owns which of the matrices of these shapes, in batches; the same on every rank.

    The largest go first, each to the rank that has the least to compute so far. A batch has the matrices that their
    owners would begin in the same span of time, so that nobody waits for a batch of which another rank has much more.
    """
    costs = [newton_schulz_cost(shape) for shape in shapes]
    span = max(_BATCH_COST, *costs, 1)
    loads = [0] * num_ranks
    batches: dict[int, list[list[int]]] = {}
    for index in sorted(range(len(shapes)), key=lambda index: (-costs[index], index)):
        owner = loads.index(min(loads))
        owners = batches.setdefault(loads[owner] // span, [[] for _ in range(num_ranks)])
        owners[owner].append(index)
        loads[owner] += costs[index]
    return tuple(batches[number] for number in sorted(batches))


def newton_schulz_cost(shape: Sequence[int]) -> int:
    """Multiplications and additions of one iteration for a matrix of this shape, up to a factor of two."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)
