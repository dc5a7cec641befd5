"""The pipeline is a value: the passes in order, one loop that runs them, one hook that observes them.

What runs on which graph::

    joint graph          merge_unshards, commute_casts, merge_gradients, merge_all_reduces, partition_joint
    forward, backward    decompose_collectives, where a plan says so, overlap_model_collectives, commute_scales,
                         insert_reduce_scatter, insert_all_gather, insert_free, prefetch_all_gather,
                         delay_reduce_scatter_wait, overlap_copies, the user's passes, end_lives, compute_early,
                         lower_collectives, pin_matmuls
    backward             update_in_backward, behind overlap_copies, where an optimizer steps in the backward

A graph without a backward (no_grad, inference) runs through both rows, but for partition_joint. What Inductor
compiles runs through outline_blocks, on a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch.fx

from . import metadata
from .commute_casts import CommuteCasts
from .commute_scales import CommuteScales
from .compute_early import ComputeEarly
from .decompose_collectives import DecomposeCollectives
from .delay_reduce_scatter_wait import DelayReduceScatterWait
from .end_lives import EndLives
from .errors import PassError, VerifyError
from .halves import Halves, copy_of
from .insert_all_gather import InsertAllGather
from .insert_free import InsertFree
from .insert_reduce_scatter import InsertReduceScatter
from .lower_collectives import LowerCollectives
from .merge_all_reduces import MergeAllReduces
from .merge_gradients import MergeGradients
from .merge_unshards import MergeUnshards
from .overlap_copies import OverlapCopies
from .overlap_model_collectives import OverlapModelCollectives
from .partition_joint import PartitionJoint
from .pin_matmuls import PinMatmuls
from .plan import Gather, PrefetchList, StepPlan
from .prefetch_all_gather import PrefetchAllGather
from .update_in_backward import UpdateInBackward
from .verifier import STAGES, Signature, Stage, stage_after, verify, verify_crossing


class Pass(Protocol):
    """A frozen dataclass whose fields are its options; the call rewrites the graph in place."""

    def __call__(self, gm: torch.fx.GraphModule) -> None: ...


Observer = Callable[[str, object, torch.fx.GraphModule], None]
"""Called after every pass with "joint", "forward" or "backward", the pass, and the graph it left."""


@dataclasses.dataclass(frozen=True)
class Side:
    """One finished graph: `scheduled` in our dialect, and `lowered`, which the compiler takes."""

    scheduled: torch.fx.GraphModule
    lowered: torch.fx.GraphModule


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The passes of a compilation; build one with `Pipeline.of`."""

    joint: tuple[Pass, ...]
    partition: PartitionJoint
    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    lowering: tuple[Pass, ...]
    observer: Observer | None = None

    @classmethod
    def of(
        cls,
        *,
        reshard: Mapping[str, bool | metadata.Part] | None = None,
        forward_prefetch: int = 1,
        backward_prefetch: int = 1,
        forward_lists: tuple[PrefetchList, ...] = (),
        backward_lists: tuple[PrefetchList, ...] = (),
        reductions: int | None = None,
        grouped: bool = False,
        plan: StepPlan | None = None,
        passes: Sequence[Pass] = (),
        poison: bool = False,
        pin_memory: bool = True,
        updates: int | None = None,
        pieces: int = 1,
        observer: Observer | None = None,
    ) -> Pipeline:
        """The passes with these options; `PartitionJoint`, `PrefetchAllGather` and `InsertAllGather` explain them.

        `reductions` may be under way at once; None goes by the distance of prefetching. A `plan` says how the buckets
        that it names are gathered, and how many reductions may be under way. `passes` are the
        user's, for graphs that are in order. With `poison`, freed buffers are filled with NaN; `pin_memory` is
        explained by `OverlapCopies`. `updates` are the states of an optimizer that steps in the backward, if one does.
        `pieces` are what the model's own collectives are decomposed into, each.
        """

        parted = frozenset(unit for unit, way in (reshard or {}).items() if isinstance(way, metadata.Part))
        in_backward = () if updates is None else (UpdateInBackward(updates),)
        decomposed = (DecomposeCollectives(pieces),) if pieces > 1 else ()

        def side(
            distance: int, lists: tuple[PrefetchList, ...], gathers: tuple[Gather, ...], *ordered: Pass
        ) -> tuple[Pass, ...]:
            late = min(distance, 1) if reductions is None else reductions
            return (
                *decomposed,
                OverlapModelCollectives(),
                CommuteScales(),
                InsertReduceScatter(grouped),
                InsertAllGather(grouped, gathers),
                InsertFree(),
                PrefetchAllGather(distance, gathers, lists),
                DelayReduceScatterWait(late if plan is None or plan.reductions is None else plan.reductions),
                OverlapCopies(pin_memory),
                *ordered,
                *passes,
                EndLives(),
                ComputeEarly(),
            )

        return cls(
            joint=(MergeUnshards(), CommuteCasts(parted), MergeGradients(), MergeAllReduces()),
            partition=PartitionJoint(dict(reshard or {})),
            forward=side(forward_prefetch, forward_lists, plan.forward if plan else ()),
            backward=side(backward_prefetch, backward_lists, plan.backward if plan else (), *in_backward),
            lowering=(LowerCollectives(poison), PinMatmuls()),
            observer=observer,
        )

    def split(self, joint: torch.fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]) -> Halves:
        """The joint graph in halves, which do not depend on the options; `Halves.of` explains the arguments."""
        self.merge(joint)
        return Halves.of(joint, num_fwd_outputs, static_inputs)

    def merge(self, joint: torch.fx.GraphModule) -> None:
        """What is done to a joint graph before it is split."""
        self._run_all("joint", self.joint, joint, STAGES[0])

    def rewrite_halves(self, halves: Halves) -> tuple[Side, Side]:
        """Forward and backward from halves, which are changed."""
        forward, backward, stage = self._partitioned(halves)
        for name, gm in (("forward", forward), ("backward", backward)):
            verify(gm, stage)
            self._observe(name, self.partition, gm)
        return (
            self._finish("forward", self.forward, forward, stage),
            self._finish("backward", self.backward, backward, stage),
        )

    def draft_halves(self, halves: Halves) -> tuple[Side, Side]:
        """As `rewrite_halves`, but neither lowered nor verified: to be looked at, and compared with other drafts."""
        forward, backward = self.partition.reshard_halves(halves)
        return _draft(self.forward, forward), _draft(self.backward, backward)

    def draft_inference(self, gm: torch.fx.GraphModule) -> Side:
        """As `rewrite_inference`, but neither lowered nor verified."""
        return _draft((*self.joint, *self.forward), gm)

    def schedule_halves(self, halves: Halves) -> tuple[Side, Side]:
        """As `draft_halves`, but verified in the end."""
        forward, backward, stage = self._partitioned(halves)
        return _scheduled(self.forward, forward, stage), _scheduled(self.backward, backward, stage)

    def schedule_inference(self, gm: torch.fx.GraphModule) -> Side:
        """As `draft_inference`, but verified in the end."""
        return _scheduled((*self.joint, *self.forward), gm, STAGES[0])

    def rewrite_inference(self, gm: torch.fx.GraphModule) -> Side:
        """The graph of a call that needs no gradients."""
        return self._finish("forward", (*self.joint, *self.forward), gm, STAGES[0])

    def _partitioned(self, halves: Halves) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule, Stage]:
        """Forward and backward from halves, which are changed, and the stage that both are in."""
        forward, backward = self.partition.reshard_halves(halves)
        verify_crossing(forward, backward, halves.num_fwd_outputs)
        return forward, backward, stage_after(self.partition, STAGES[0])

    def _finish(self, name: str, steps: tuple[Pass, ...], gm: torch.fx.GraphModule, stage: Stage) -> Side:
        stage = self._run_all(name, steps, gm, stage)
        verify(gm, stage, freed=True)
        scheduled = copy_of(gm)
        self._run_all(name, self.lowering, gm, stage)
        gm.recompile()
        return Side(scheduled, gm)

    def _run_all(self, name: str, steps: tuple[Pass, ...], gm: torch.fx.GraphModule, stage: Stage) -> Stage:
        """Run passes on a graph in this stage, each of them verified and observed; returns the stage that it is in."""
        signature = Signature.of(gm)
        for step in steps:
            try:
                step(gm)
                stage = stage_after(step, stage)
                verify(gm, stage, signature=signature)
            except (PassError, VerifyError) as e:
                e.add_note(f"while running {step} on the {name} graph")
                raise
            self._observe(name, step, gm)
        return stage

    def _observe(self, name: str, step: object, gm: torch.fx.GraphModule) -> None:
        if self.observer is not None:
            self.observer(name, step, gm)


def _scheduled(steps: tuple[Pass, ...], gm: torch.fx.GraphModule, stage: Stage) -> Side:
    side = _draft(steps, gm)
    for step in steps:
        stage = stage_after(step, stage)
    verify(gm, stage, freed=True)
    return side


def _draft(steps: tuple[Pass, ...], gm: torch.fx.GraphModule) -> Side:
    for step in steps:
        step(gm)
    return Side(gm, gm)
