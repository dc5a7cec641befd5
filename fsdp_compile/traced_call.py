"""A call of a model is traced with all layers, or with a few of those that are equal, which stand for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from .compiler.calls import trace
from .compiler.traces import Trace
from .errors import CaptureError, ConfigError
from .layout.buckets import Layout
from .layout.precision import install_casts
from .module.decision import Decision
from .module.equal_layers import EqualLayers
from .module.reading import reading_copy
from .passes.pipeline import Pipeline
from .passes.plan import StepPlan
from .progress import phase
from .runtime.meta import off_meta, untouched

FEW = 6
"""Layers that are traced for all, of at least twice as many: the first and the last may differ, and four must not."""

Decided = tuple[Decision, Sequence[Layout]]
"""How a model is sharded, and where its parameters lie."""


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """`model(*args, **kwargs)`; tensors on the meta device become tensors of `device`.

    Attributes:
        decide: how the model is sharded, with the layers that it has.
        pipeline: the passes for a plan, or without one for None.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: str | torch.device
    decide: Callable[[], Decided]
    pipeline: Callable[[StepPlan | None], Pipeline]

    def reading(self, decided: Decided) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """A copy of the model that reads its parameters from shards, and its arguments."""
        decision, layouts = decided
        reading = reading_copy(self.model, layouts, self.device)
        install_casts(reading, decision.precision)
        return reading, *off_meta((self.args, self.kwargs), self.device)

    def trace(self, decided: Decided) -> Trace:
        with untouched(self.device):
            return trace(*self.reading(decided), self.pipeline)

    def trace_few(self, layers: EqualLayers | None, layouts: Sequence[Layout]) -> Trace | None:
        """The trace of the whole model, told from a few of its layers.

        None where it cannot be told, or where these are not much fewer.

        Args:
            layouts: of the whole model.
        """
        if layers is None or len(layers) < 2 * FEW or not layouts:
            return None
        with phase("tracing") as tracing:
            try:
                with layers.shortened(FEW):
                    few = self.trace(self.decide())
            except (CaptureError, ConfigError):  # the model, or an option, names layers that are not there
                return None
            if (whole := few.lengthened(FEW, layers.names, layouts)) is not None:
                tracing.remark = f" ({FEW} of {len(layers)} equal layers)"
            return whole
