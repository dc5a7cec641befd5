"""What lasts from one call to the next, within a step of several calls: as the user says, or a pipeline."""

from __future__ import annotations

import dataclasses

import torch

from .collectives import wait


@dataclasses.dataclass(eq=False)
class Lasting:
    """Whether something lasts.

    torch's pipelines say it before the first backward of a step, which is behind several forwards, and take it back at
    the end. So what lasted in such a step is taken to last in the next, until something is said there.

    Attributes:
        said: None for nothing.
        in_step, in_last_step: whether it lasted for some time.
        is_asked: whether a call of this step has asked.
    """

    said: bool | None = None
    in_step: bool = False
    in_last_step: bool = False
    is_asked: bool = False

    def say(self, lasts: bool) -> None:
        self.said = lasts
        self.in_step |= lasts

    def is_for_call(self) -> bool:
        """Whether it lasts beyond the call that begins now."""
        self.is_asked = True
        return self.in_last_step if self.said is None else self.said

    def end_step(self) -> None:
        """The gradients of the calls that have asked are reduced."""
        if self.is_asked:
            self.in_last_step, self.in_step, self.is_asked = self.in_step, bool(self.said), False

    def leave_open(self) -> None:
        """That it was taken back says nothing of the next step."""
        self.said = self.said or None


@dataclasses.dataclass(eq=False)
class GatheredOnce:
    """What was gathered of one shard, for several calls.

    Attributes:
        parts: for each parameter, all ranks' rows of it, in one dimension; maybe on their way.
        data, num_steps: the shard's values that were gathered, and before which step of an optimizer.
    """

    parts: list[torch.Tensor]
    data: torch.Tensor
    num_steps: int

    def wait(self) -> list[torch.Tensor]:
        """The parts, ready."""
        return [wait(part) for part in self.parts]
