"""Optimizers that step in the backward: parameters are updated there, and their gradients are gone when it ends.

A compiled backward calls `fsdp::update` where the gradient of a bucket is there. If nothing else of this step can read
the shard or add to its gradient, the parameters of the bucket are updated at once; all others are when autograd is done
with the backward. With clipping or a scaler that is all of them, since both need all gradients first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim

from ..passes import ops
from .flat_shard import FlatShard, Shards
from .local_steps import is_elementwise

Update = Callable[[Tensor, int], None]
"""Takes the gradient of a shard, and which output of the backward that would be."""


class Updates:
    """The optimizers of one model that step in its backward.

    Attributes:
        optimizers: each steps once for every backward that does not keep its gradients.
        before_steps: called when all gradients are in their places; None if parameters are updated before.
        step: makes a step of one of them, with the gradients that there are.
        is_due: whether they will step at the end of the running backward.
        is_kept: with a single rank, whether the last forward keeps its gradients for a later step.
    """

    def __init__(
        self,
        optimizers: Sequence[optim.Optimizer],
        before_steps: Callable[[], None] | None,
        step: Callable[[optim.Optimizer], object],
    ) -> None:
        self.optimizers, self.before_steps, self.step = optimizers, before_steps, step
        self.is_due = self.is_kept = False
        self._places: dict[int, tuple[int, int]] = {}
        self._groups: dict[tuple[int, int, FlatShard], dict[str, Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, or one from a file, has other parameters: nothing steps in its backward."""
        return type(None), ()

    @property
    def are_early(self) -> bool:
        """Whether parameters are updated before all gradients are there."""
        return self.before_steps is None

    def update(self, shard: FlatShard) -> None:
        """Update the parameters of a shard that have a gradient, and drop that: of optimizers that treat every element
        by itself."""
        for index, optimizer in enumerate(self.optimizers):
            if is_elementwise(optimizer) and (groups := self._groups_of(index, shard)):
                with _only(optimizer, groups):
                    type(optimizer).step(optimizer)  # not its own: a scheduler counts those calls
                for group in groups:
                    _drop_gradients(group)

    def _groups_of(self, index: int, shard: FlatShard) -> list[dict[str, Any]]:
        """An optimizer's groups, with those parameters of a shard that have a gradient: each time the same dicts."""
        self._places = self._places or {
            id(parameter): (index, number)
            for index, optimizer in enumerate(self.optimizers)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }
        found: dict[int, list[Any]] = {}
        for parameter in shard.parameters:
            of, number = self._places.get(id(parameter), (None, 0))
            if of == index and parameter.grad is not None:
                found.setdefault(number, []).append(parameter)
        groups = []
        for number, parameters in found.items():
            group = self._groups.setdefault((index, number, shard), {})
            group.update(self.optimizers[index].param_groups[number], params=parameters)
            groups.append(group)
        return groups

    @torch.no_grad()
    def finish(self) -> None:
        """At the end of a backward: update what was not yet, and drop its gradients."""
        self._places = {}
        if self.before_steps is not None:
            self.before_steps()
        for optimizer in self.optimizers:
            self.step(optimizer)
            for group in optimizer.param_groups:
                _drop_gradients(group)


def _drop_gradients(group: dict[str, Any]) -> None:
    for parameter in group["params"]:
        parameter.grad = None


@contextmanager
def _only(optimizer: optim.Optimizer, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Inside, these are the optimizer's groups."""
    whole, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = whole


def step_after_backward(sharding: Shards) -> None:
    """Have the optimizers of a model step at the end of the running backward, if there are any that do."""
    updates = sharding.updates
    if updates is None or updates.is_due:
        return
    updates.is_due = True

    def finish() -> None:
        if sharding.is_finishing:  # what earlier steps kept is yet to be reduced
            torch.autograd.Variable._execution_engine.queue_callback(finish)
            return
        updates.is_due = False
        for shard in sharding.shards:
            shard.awaited = 0
        updates.finish()

    torch.autograd.Variable._execution_engine.queue_callback(finish)


class _Running(threading.local):
    """What `fsdp::update` does on this thread: that of the compiled backward that runs."""

    update: Update | None = None


_running = _Running()


@contextmanager
def updating(update: Update) -> Iterator[None]:
    """Inside, `fsdp::update` calls this, as where this was entered: a compiled graph runs below autograd."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def call(gradient: Tensor, output: int) -> None:
        with torch._C._ForceDispatchKeyGuard(*keys), torch.no_grad():
            update(gradient, output)

    before, _running.update = _running.update, call
    try:
        yield
    finally:
        _running.update = before


def _update(gradient: Tensor, bucket: str, output: int, states: int) -> None:
    if _running.update is None:
        raise AssertionError(f"the gradient of {bucket} is updated outside of a compiled backward")
    _running.update(gradient, output)


ops.LIBRARY.impl("update", _update, "CompositeExplicitAutograd")
