"""Predictions: what a step of the rewritten graphs takes on described hardware, in seconds and in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from .formulas import DEFINITIONS, Formula, formulas_of
from .hardware import Hardware
from .memory import CATEGORIES, Memory, Moment, memory_of
from .nodes import Compiler
from .optimizers import find_optimizer, gradient_bytes, state_bytes
from .timeline import COMPUTE, COPIES, Timeline, rings_of, simulate
from .work import Work

_NEGLIGIBLE = 1e-3  # of a step


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step: forward, backward, and the optimizer.

    Attributes:
        work: what it was predicted from.
        flops: of forward and backward, what is computed twice counted twice.
        model_flops: three times those of the forward, as model FLOPs utilisation has it.
        graphs, optimizer: what was predicted.
    """

    work: Work
    hardware: Hardware
    timeline: Timeline
    memory: Memory
    optimizer_seconds: float
    flops: float
    model_flops: float
    peak_flops: float
    graphs: RewrittenGraphs
    optimizer: str

    @property
    def seconds(self) -> float:
        return self.timeline.seconds + self.optimizer_seconds

    @property
    def peak(self) -> Moment:
        """The moment at which most is held."""
        return self.memory.peak

    @property
    def lower_bound(self) -> float:
        """Seconds that no schedule of these graphs can go below on this hardware."""
        return self.timeline.lower_bound + self.optimizer_seconds

    @property
    def contended_bound(self) -> float:
        """The lower bound where a collective slows down what is computed meanwhile (`Hardware.contention`, c):

        max(communication, compute + (1 - 1 / c) communication), of the busiest process group.
        """
        busiest = max(self.timeline.communication.values(), default=0.0)
        slowed = self.timeline.compute + (1 - 1 / self.hardware.contention) * busiest
        return max(self.timeline.lower_bound, slowed) + self.optimizer_seconds

    @property
    def binds(self) -> str:
        """What the lower bound is made of: "compute", "copies", or the process group that is busy longest."""
        lanes = {COMPUTE: self.timeline.compute, **self.timeline.sending}
        return max(lanes, key=lambda lane: lanes[lane])

    @property
    def exposed(self) -> float:
        """Seconds that compute stands still and waits for communication."""
        return sum(self.timeline.exposed.values())

    @property
    def slowed(self) -> float:
        """Seconds that compute takes longer because something is sent meanwhile (`Hardware.contention`)."""
        return self.timeline.seconds - self.timeline.compute - self.exposed

    @property
    def model_collectives(self) -> float:
        """Seconds of the collectives that the model calls itself, which count as compute."""
        return sum(kernel.seconds(self.hardware) for side in self.work.sides for kernel in side.collectives)

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation: `model_flops` in a step's time, as a fraction of the dense peak."""
        return self.model_flops / self.seconds / self.peak_flops if self.seconds else 0.0

    def formula(self, name: str, names: Sequence[str] = ()) -> Formula:
        """One of `formulas.DEFINITIONS`, of these graphs in symbols; `names` are those of the dynamic dimensions.

        Raises:
            ConfigError: there is no such formula, or as `formulas_of`.
        """
        if name not in DEFINITIONS:
            raise ConfigError(f"there is no formula {name!r}; there are {', '.join(DEFINITIONS)}")
        return formulas_of(self.graphs, optimizer=self.optimizer, compiler=self.work.compiler, names=names)[name]

    def __str__(self) -> str:
        above = f"{self.seconds / self.lower_bound - 1:.1%} above it" if self.lower_bound else "empty"
        is_slowed = self.slowed > _NEGLIGIBLE * self.seconds
        slowed = f" (beside communication {time_text(self.slowed)} more)" if is_slowed else ""
        sent = self.model_collectives
        of_model = f", of it {time_text(sent)} of collectives of the model" if sent else ""
        binds = self.binds if self.binds in (COMPUTE, COPIES) else f"communication ({self.binds})"
        rows = {
            "step": f"{time_text(self.seconds)} on {self.hardware.name}: compute {time_text(self.timeline.compute)}"
            f"{of_model}{slowed}, exposed communication {time_text(self.exposed)}, "
            f"optimizer {time_text(self.optimizer_seconds)}",
            "lower bound": f"{time_text(self.lower_bound)}, set by {binds}; the schedule is {above}",
            "memory": memory_text(self.memory),
        }
        return table(rows.items())


def memory_text(memory: Memory) -> str:
    """The peak, and what it is made of."""
    peak = memory.peak
    held = ", ".join(f"{name} {bytes_text(peak.held[name])}" for name in CATEGORIES if peak.held[name])
    return f"{bytes_text(peak.total)} at the peak, in the {peak.side}: {held}"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """A line for each (title, text)."""
    return "\n".join(f"{title:<14}{text}" for title, text in rows)


def time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.5 else f"{seconds:.3g} s"


_UNITS = (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")


def bytes_text(num_bytes: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if num_bytes >= size), (1, "B"))
    return f"{num_bytes / size:.4g} {unit}"


def predict(
    graphs: RewrittenGraphs,
    hardware: Hardware,
    *,
    optimizer: str = "adam",
    compiler: Compiler = "inductor",
) -> Prediction:
    """What a step of these graphs takes of a rank of this hardware; ranks are numbered node by node.

    Args:
        optimizer: one of `OPTIMIZERS`, that steps after the backward; what is updated in it says how itself.
        compiler: what compiles the graphs; see `nodes.Compiler`.

    Raises:
        ConfigError: there is no such optimizer.
    """
    of_optimizer = find_optimizer(optimizer)
    work = Work.of(graphs, compiler=compiler)
    gradients = gradient_bytes(work)
    kernels = [kernel for side in work.sides for kernel in side.kernels]
    main_dtype = max(kernels, key=lambda kernel: kernel.flops).dtype if kernels else torch.float32
    return Prediction(
        work,
        hardware,
        simulate(work, hardware, rings_of(work, hardware)),
        step_memory(work, optimizer, hardware.reduction_workspace),
        of_optimizer.traffic * gradients / hardware.memory_bandwidth,
        sum(side.flops for side in work.sides),
        (3 if work.backward else 1) * work.forward.flops,
        hardware.flops_of(main_dtype) / hardware.efficiency,
        graphs,
        optimizer,
    )


def step_memory(work: Work, optimizer: str, reduction_workspace: float = 0.0) -> Memory:
    """What a rank holds during a step, the states of the optimizer included."""
    states = int(state_bytes(work, find_optimizer(optimizer)))
    return memory_of(work, optimizer_bytes=states, reduction_workspace=reduction_workspace)
