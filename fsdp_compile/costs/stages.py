"""Stages: what a step takes of a model that is cut into a pipeline's stages, each on ranks of its own.

The rows of a rank pass the stages as micro-batches, in the order of 1F1B (Narayanan et al., "PipeDream", 2019; torch's
`Schedule1F1B`): of P stages, stage s computes P - s forwards first, and from then on a backward and a forward in turns.
It keeps what at most P - s micro-batches save. Gradients are reduced in the last backward. What a unit gathers is
gathered in every call, or, if it is not resharded after the forward, in the first forward only, and kept.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property

from ..errors import ConfigError
from ..passes import ops
from . import collectives
from .collectives import Ring
from .hardware import Hardware
from .memory import Moment
from .nodes import full_bytes
from .predict import Prediction
from .timeline import COMPUTE, Step, Timeline, rings_of, run, steps_of

_Pass = tuple[str, int]  # "forward" or "backward", and the number of the micro-batch


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a model, on one of its ranks.

    Attributes:
        prediction: of one micro-batch that gathers and reduces.
        received: bytes of a micro-batch from the stage before, which their gradients go back to.
    """

    prediction: Prediction
    received: int
    _timelines: dict[tuple[str, bool, bool], Timeline] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def call(self, name: str, number: int, num_micro_batches: int) -> Timeline:
        """The forward or the backward of a micro-batch."""
        gathers = number == 0 or not self._keeps_gathered
        reduces = name == "backward" and number == num_micro_batches - 1
        if (key := (name, gathers, reduces)) not in self._timelines:
            steps = [step for step in self._steps[name] if _runs(step, gathers, reduces)]
            self._timelines[key] = run(steps, self.prediction.hardware)
        return self._timelines[key]

    @cached_property
    def _keeps_gathered(self) -> bool:
        """Whether no backward gathers, so that what a forward has gathered serves every micro-batch."""
        backward = self.prediction.work.backward
        return backward is None or not any(map(ops.is_all_gather, backward.graph.nodes))

    @cached_property
    def _steps(self) -> Mapping[str, list[Step]]:
        """Of forward and backward, each by itself."""
        work, hardware = self.prediction.work, self.prediction.hardware
        rings = rings_of(work, hardware)
        only = {"forward": dataclasses.replace(work, backward=None)}
        if work.backward is not None:
            only["backward"] = dataclasses.replace(work, forward=work.backward, backward=None)
        return {name: steps_of(side, hardware, rings) for name, side in only.items()}

    def peak(self, num_micro_batches: int, under_way: int, handed_on: int) -> Moment:
        """The moment at which most is held.

        Args:
            under_way: how many micro-batches are, at once.
            handed_on: bytes of each for the stage after; both stages keep them until the backward.
        """
        memory = self.prediction.memory
        *_, end_of_forward = (moment for moment in memory.moments if moment.side == "forward")
        saved = end_of_forward.held["activations"] + self.received + handed_on
        gathered = max(moment.held["gathered"] for moment in memory.moments) if self._keeps_gathered else 0
        kept = self._kept_gradients if num_micro_batches > 1 else 0

        def with_others(moment: Moment) -> Moment:
            held = dict(moment.held)
            held["activations"] += (under_way - 1) * saved
            held["gathered"] = max(held["gathered"], gathered)
            held["gradients"] += kept
            return dataclasses.replace(moment, held=held)

        return max(map(with_others, memory.moments), key=lambda moment: moment.total)

    @property
    def _kept_gradients(self) -> int:
        """Bytes of the gradients, in full, that are added up over micro-batches."""
        backward = self.prediction.work.backward
        of_bucket: dict[str, int] = {}
        for node in () if backward is None else filter(ops.is_reduction, backward.graph.nodes):
            bucket = ops.argument(node, "bucket")  # copies of shards add theirs up as well, which are smaller
            of_bucket[bucket] = max(of_bucket.get(bucket, 0), full_bytes(node))
        return sum(of_bucket.values())


def _runs(step: Step, gathers: bool, reduces: bool) -> bool:
    """Whether a step is a part of a call that gathers, or that reduces; a wait for nothing takes no time."""
    if step.lane == COMPUTE:
        return True
    return reduces if ops.is_reduction(step.node) else gathers or not ops.is_all_gather(step.node)


@dataclasses.dataclass(frozen=True)
class StagedStep:
    """A step of all stages, on ranks of this hardware; those of a stage are neighbours.

    Attributes:
        ranks_of_stage: how many a stage has.
        num_micro_batches: of a step.

    Raises:
        ConfigError: there are fewer micro-batches than stages.
    """

    stages: Sequence[Stage]
    hardware: Hardware
    ranks_of_stage: int
    num_micro_batches: int

    def __post_init__(self) -> None:
        if self.num_micro_batches < len(self.stages):
            raise ConfigError(
                f"a pipeline of {len(self.stages)} stages needs as many micro-batches, and a step has "
                f"{self.num_micro_batches}"
            )

    @property
    def seconds(self) -> float:
        return max(end + stage.prediction.optimizer_seconds for end, stage in zip(self._ends, self.stages, strict=True))

    @property
    def idle(self) -> float:
        """Seconds that the busiest stage waits for the others."""
        return self.seconds - self._busy_seconds(self._busiest)

    @property
    def exposed(self) -> float:
        """Seconds that the busiest stage stands still and waits for its gathers and reductions."""
        return sum(sum(call.exposed.values()) for call in self._calls(self._busiest))

    @property
    def model_collectives(self) -> float:
        """Seconds of the collectives that the model calls itself, in the busiest stage."""
        return self.num_micro_batches * self.stages[self._busiest].prediction.model_collectives

    @property
    def lower_bound(self) -> float:
        """Seconds of the busiest stage, if nothing waits: of its compute, or of one group's messages."""
        return max(self._lanes.values()) + self.stages[self._busiest].prediction.optimizer_seconds

    @property
    def binds(self) -> str:
        """What the lower bound is made of: as `Prediction.binds`."""
        return max(self._lanes, key=lambda lane: self._lanes[lane])

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation of all ranks."""
        flops = sum(stage.prediction.model_flops / stage.prediction.peak_flops for stage in self.stages)
        return self.num_micro_batches * flops / len(self.stages) / self.seconds

    @cached_property
    def peak(self) -> Moment:
        """The moment at which a rank of any stage holds most."""
        num_stages = len(self.stages)
        handed_on = [*(stage.received for stage in self.stages[1:]), 0]
        peaks = [
            stage.peak(self.num_micro_batches, num_stages - index, handed_on[index])
            for index, stage in enumerate(self.stages)
        ]
        return max(peaks, key=lambda moment: moment.total)

    @cached_property
    def _ends(self) -> list[float]:
        """When each stage is done with its last backward."""
        num_stages, num = len(self.stages), self.num_micro_batches
        left = [deque(order_of_stage(index, num_stages, num)) for index in range(num_stages)]
        end_of: dict[tuple[int, _Pass], float] = {}
        now = [0.0] * num_stages
        while any(left):
            for index, calls in enumerate(left):
                while calls and (arrival := self._arrival(index, calls[0], end_of)) is not None:
                    call = calls.popleft()
                    seconds = self.stages[index].call(*call, num).seconds
                    now[index] = end_of[index, call] = max(now[index], arrival) + seconds
        return now

    def _arrival(self, index: int, call: _Pass, end_of: Mapping[tuple[int, _Pass], float]) -> float | None:
        """When a stage has what a call takes, from that before it or, for a backward, after it; None: not yet known."""
        before = index - 1 if call[0] == "forward" else index + 1
        if not 0 <= before < len(self.stages):
            return 0.0
        if (before, call) not in end_of:
            return None
        num_bytes = self.stages[max(before, index)].received
        ring = Ring.of_axis(len(self.stages), self.ranks_of_stage, self.hardware)
        return end_of[before, call] + collectives.send(num_bytes, ring, self.hardware)

    def _calls(self, index: int) -> list[Timeline]:
        stage, num = self.stages[index], self.num_micro_batches
        return [stage.call(name, number, num) for name, number in order_of_stage(index, len(self.stages), num)]

    def _busy_seconds(self, index: int) -> float:
        optimizer = self.stages[index].prediction.optimizer_seconds
        return sum(call.seconds for call in self._calls(index)) + optimizer

    @cached_property
    def _busiest(self) -> int:
        return max(range(len(self.stages)), key=self._busy_seconds)

    @cached_property
    def _lanes(self) -> Mapping[str, float]:
        """Seconds of compute, of each process group, and of copies, in a step of the busiest stage."""
        lanes = {COMPUTE: 0.0}
        for call in self._calls(self._busiest):
            for lane, seconds in {COMPUTE: call.compute, **call.sending}.items():
                lanes[lane] = lanes.get(lane, 0.0) + seconds
        return lanes


def order_of_stage(index: int, num_stages: int, num_micro_batches: int) -> list[_Pass]:
    """What a stage computes, in the order of 1F1B.

    >>> order_of_stage(0, 2, 3)
    [('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2), ('backward', 1), ('backward', 2)]
    """
    ahead = min(num_stages - index, num_micro_batches)
    order: list[_Pass] = [("forward", number) for number in range(ahead)]
    for number in range(num_micro_batches):
        order.append(("backward", number))
        if number + ahead < num_micro_batches:
            order.append(("forward", number + ahead))
    return order
