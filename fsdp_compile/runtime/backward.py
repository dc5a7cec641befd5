"""Compiled backwards: what goes in besides what autograd passes, and whose gradients come out.

Which parameters have a gradient is the same on all ranks: one that any rank has is reduced, and a zero of those that
have none. Where it can differ, in graphs with several results that lead to different parameters, the ranks ask each
other, in one small reduction that runs beside the backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..dependence import Dependence
from .collectives import OnAnyRank
from .flat_shard import FlatShard, Shards
from .given import HasGradient
from .gradients import groups_over, note_gradients_of, take_accumulated

Key: TypeAlias = "tuple[FlatShard, int] | int"
"""A parameter of a shard, by its offset; or another input of the graph, by its position."""


@dataclasses.dataclass(frozen=True)
class BucketGradient:
    """What a backward does with the gradients of a bucket.

    Attributes:
        offsets: of the parameters that it computes gradients for.
        is_kept: whether they are left as they are, to be reduced later.
        accumulated: the input of the backward that holds what earlier steps kept, if it takes that along.
    """

    bucket: str
    offsets: Sequence[int]
    is_kept: bool
    accumulated: str | None


@dataclasses.dataclass
class CompiledBackward:
    """The backward of one graph.

    Attributes:
        models: the shards of the models that it belongs to.
        shards: of its inputs, by position.
        others: positions of its inputs that are not shards.
        dependence: which results lead to which gradients; None if all lead to all.
    """

    models: Sequence[weakref.ref[Shards]]
    shards: Mapping[int, weakref.ref[FlatShard]]
    others: Sequence[int]
    dependence: Dependence | None = None

    def await_gradients(self) -> None:
        """Behind a forward that this will run for."""
        for shard in self._alive().values():
            if shard.sharding is not None and shard.sharding.updates is not None:
                shard.awaited += 1

    def begin(
        self, gradients: Sequence[BucketGradient], arguments: dict[str, Any], has_gradient: HasGradient | None
    ) -> RunningBackward:
        """Before it runs, with its arguments by name."""
        alive = self._alive()
        for shard in alive.values():
            shard.awaited -= shard.awaited > 0
        gradient_of = {gradient.bucket: gradient for gradient in gradients}
        handed = [
            (shard, gradient_of[shard.layout.bucket]) for shard in alive.values() if shard.layout.bucket in gradient_of
        ]
        for shard, gradient in handed:
            if (name := gradient.accumulated) is not None:
                arguments[name] = take_accumulated(shard, arguments[name])
        local = _Local(self.dependence, has_gradient)
        asked = local.doubts(handed)
        pending = self._ask(list(asked.values())) if asked else None
        return RunningBackward(self, alive, handed, local, asked, pending)

    def _alive(self) -> dict[int, FlatShard]:
        return {index: shard for index, reference in self.shards.items() if (shard := reference()) is not None}

    def _ask(self, is_here: list[bool]) -> OnAnyRank | None:
        """The ranks of all models that the graph belongs to; None with a single one."""
        alive = [model for reference in self.models if (model := reference()) is not None]
        firsts = [model.shards[0] for model in alive if model.shards]
        if not (groups := groups_over(firsts)):
            return None
        return OnAnyRank(is_here, groups, firsts[0].layout.compute_device or firsts[0].data.device)


class RunningBackward:
    """A compiled backward that runs.

    The arguments are its graph, the shards by position, those that get gradients with what they get, what this rank
    knows of them, and what it has asked the others.
    """

    def __init__(
        self,
        compiled: CompiledBackward,
        shards: Mapping[int, FlatShard],
        handed: Sequence[tuple[FlatShard, BucketGradient]],
        local: _Local,
        asked: Mapping[Key, bool],
        pending: OnAnyRank | None,
    ) -> None:
        self._compiled, self._shards, self._local = compiled, shards, local
        self._gradient_of = dict(handed)
        self._asked, self._pending = asked, pending

    def update(self, gradient: torch.Tensor, output: int) -> None:
        """The gradient of a shard is there: its parameters get it, and are updated if nothing of this step reads them.

        The generated code may take its memory for something else when this has returned: what is kept is a copy.
        """
        shard = self._shards[output]
        updates = None if shard.sharding is None else shard.sharding.updates
        is_last = updates is not None and updates.are_early and not shard.awaited
        received = self._local.received(shard, self._gradient_of.pop(shard), self._present())
        is_kept = not is_last or shard.has_hooks
        shard.give(gradient.clone() if is_kept else gradient, received, shard.take_kept())
        if is_last:
            updates.update(shard)  # type: ignore[union-attr]

    def finish(self, returned: list[Any]) -> None:
        """When it has run, with what that returns, which may be replaced."""
        present = self._present()
        for shard, gradient in self._gradient_of.items():
            self._local.note(shard, gradient, present)
        if (has_gradient := self._local.has_gradient) is not None:
            for index in self._compiled.others:
                if not present.get(index, has_gradient(index)):
                    returned[index] = None

    def _present(self) -> Mapping[Key, bool]:
        """What of that which was asked is present on any rank."""
        if self._pending is not None:
            self._asked = dict(zip(self._asked, self._pending.wait(), strict=True))
            self._pending = None
        return self._asked


@dataclasses.dataclass(frozen=True)
class _Local:
    """What this rank knows of the gradients of a running backward."""

    dependence: Dependence | None
    has_gradient: HasGradient | None

    @property
    def is_sure(self) -> bool:
        """Whether the other ranks have the same gradients, as far as they come from this backward."""
        return self.dependence is None or not self.dependence.can_differ

    def doubts(self, handed: Sequence[tuple[FlatShard, BucketGradient]]) -> dict[Key, bool]:
        """What other ranks may have a gradient for, or not, and whether this one has: the same keys on all ranks."""
        found: dict[Key, bool] = {}
        for shard, gradient in handed:
            if gradient.is_kept:
                continue
            own = set(self.own(gradient))
            doubtful = set() if self.is_sure else set(gradient.offsets)
            if (accumulation := shard.accumulation) is not None and accumulation.is_taken:
                doubtful |= accumulation.doubtful
                own |= accumulation.offsets
            found |= {(shard, offset): offset in own for offset in sorted(doubtful)}
        if self.dependence is not None and self.has_gradient is not None and not self.is_sure:
            found |= {index: self.has_gradient(index) for index in sorted(self.dependence.passed_on)}
        return found

    def own(self, gradient: BucketGradient) -> Sequence[int]:
        """The offsets of those parameters that have a gradient here."""
        if self.has_gradient is None:
            return gradient.offsets
        return [offset for offset in gradient.offsets if self.has_gradient((gradient.bucket, offset))]

    def note(self, shard: FlatShard, gradient: BucketGradient, present: Mapping[Key, bool]) -> None:
        """Note what is `present` of it, on any rank; of what is kept, what is here."""
        if gradient.is_kept:
            own = self.own(gradient)
            note_gradients_of(shard, own, is_kept=True, doubtful=() if self.is_sure else gradient.offsets)
        else:
            shard.received |= self.received(shard, gradient, present)

    def received(self, shard: FlatShard, gradient: BucketGradient, present: Mapping[Key, bool]) -> set[int]:
        """The offsets of the parameters that have a gradient on any rank, of one that is not kept."""
        here = set(self.own(gradient))
        note_gradients_of(shard, (), is_kept=False)
        if (accumulation := shard.accumulation) is not None and accumulation.is_taken:
            accumulation.offsets.update(
                offset for offset in accumulation.doubtful if present.get((shard, offset), False)
            )
        return {offset for offset in gradient.offsets if present.get((shard, offset), offset in here)}
