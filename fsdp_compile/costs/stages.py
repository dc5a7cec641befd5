"""Stages: what a step takes of a model that is cut into a pipeline's stages, each on ranks of its own.

The rows of a rank pass the stages as micro-batches. Where each rank of a pipeline has one stage, they do so in the
order of 1F1B (Narayanan et al., "PipeDream", 2019; torch's `Schedule1F1B`): of P stages, stage s computes P - s
forwards first, and from then on a backward and a forward in turns. Where each has V stages, stage s is on pp rank s
modulo P, and the order is that of interleaved 1F1B (Narayanan et al., "Efficient large-scale language model training",
2021; torch's `ScheduleInterleaved1F1B`): the pipeline fills in 1/V of the time, with V times the messages.

A rank keeps what the micro-batches save that are under way in its stages. Gradients are reduced in the last backward of
a stage. What a unit gathers is gathered in every call, or, if it is not resharded after the forward, in the first
forward only, and kept.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from ..errors import ConfigError
from ..passes import ops
from . import collectives
from .collectives import Ring
from .hardware import Hardware
from .memory import CATEGORIES, Moment
from .nodes import full_bytes
from .predict import Prediction
from .timeline import COMPUTE, Step, Timeline, rings_of, run, steps_of


class Call(NamedTuple):
    """The "forward" or "backward" of a micro-batch in a stage, by their numbers."""

    stage: int
    name: str
    number: int


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
        """The moment of its calls at which most is held.

        Args:
            under_way: how many micro-batches are, at once.
            handed_on: bytes of each for the stage after; both stages keep them until the backward.
        """
        of_others = self.between_calls(num_micro_batches, under_way - 1, handed_on)
        added = {name: of_others[name] for name in ("activations", "gradients")}
        held = {name: size + added.get(name, 0) for name, size in self._peak.held.items()}
        return dataclasses.replace(self._peak, held=held)

    def between_calls(self, num_micro_batches: int, under_way: int, handed_on: int) -> Mapping[str, int]:
        """What is held while the stage computes nothing, by category; `Args` as for `peak`."""
        moments = self.prediction.memory.moments
        return {
            **{name: moments[0].held[name] for name in ("shards", "optimizer", "inputs")},
            "activations": under_way * (self._saved + self.received + handed_on),
            "gathered": self._stays_gathered,
            "gradients": self._kept_gradients if num_micro_batches > 1 else 0,
        }

    @cached_property
    def _peak(self) -> Moment:
        """Of one micro-batch, where what is kept stays gathered."""

        def keeping(moment: Moment) -> Moment:
            gathered = max(moment.held["gathered"], self._stays_gathered)
            return dataclasses.replace(moment, held={**moment.held, "gathered": gathered})

        return max(map(keeping, self.prediction.memory.moments), key=lambda moment: moment.total)

    @cached_property
    def _saved(self) -> int:
        """Bytes that the forward of a micro-batch saves for its backward."""
        *_, end = (moment for moment in self.prediction.memory.moments if moment.side == "forward")
        return end.held["activations"]

    @cached_property
    def _stays_gathered(self) -> int:
        """Bytes of full parameters between calls."""
        moments = self.prediction.memory.moments
        return max(moment.held["gathered"] for moment in (moments if self._keeps_gathered else moments[:1]))

    @cached_property
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

    Ranks that have the same stages have the same number along the pipeline, their pp rank.

    Attributes:
        ranks_of_stage: how many a stage has.
        num_micro_batches: of a step.
        stages_of_rank: how many a rank has; of P pp ranks, pp rank p has the stages p, P + p, 2 P + p, ...

    Raises:
        ConfigError: see `orders`.
    """

    stages: Sequence[Stage]
    hardware: Hardware
    ranks_of_stage: int
    num_micro_batches: int
    stages_of_rank: int = 1

    def __post_init__(self) -> None:
        self._orders  # noqa: B018  refuses what no order is for

    @cached_property
    def _orders(self) -> Sequence[Sequence[Call]]:
        return orders(self._pp_size, self.stages_of_rank, self.num_micro_batches)

    @property
    def _pp_size(self) -> int:
        return len(self.stages) // self.stages_of_rank

    def _at(self, pp_rank: int) -> Sequence[Stage]:
        return self.stages[pp_rank :: self._pp_size]

    @property
    def seconds(self) -> float:
        return max(end + self._optimizer_seconds(pp_rank) for pp_rank, end in enumerate(self._ends))

    @property
    def idle(self) -> float:
        """Seconds that the busiest pp rank waits for the others."""
        return self.seconds - self._busy_seconds(self._busiest)

    @property
    def exposed(self) -> float:
        """Seconds that the busiest pp rank stands still and waits for its gathers and reductions."""
        return sum(sum(call.exposed.values()) for call in self._calls(self._busiest))

    @property
    def model_collectives(self) -> float:
        """Seconds of the collectives that the model calls itself, in the busiest pp rank."""
        return self.num_micro_batches * sum(stage.prediction.model_collectives for stage in self._at(self._busiest))

    @property
    def lower_bound(self) -> float:
        """Seconds of the busiest pp rank, if nothing waits: of its compute, or of one group's messages."""
        return max(self._lanes.values()) + self._optimizer_seconds(self._busiest)

    @property
    def binds(self) -> str:
        """What the lower bound is made of: as `Prediction.binds`."""
        return max(self._lanes, key=lambda lane: self._lanes[lane])

    @property
    def utilisation(self) -> float:
        """Model FLOPs utilisation of all ranks."""
        flops = sum(stage.prediction.model_flops / stage.prediction.peak_flops for stage in self.stages)
        return self.num_micro_batches * flops / self._pp_size / self.seconds

    @cached_property
    def peak(self) -> Moment:
        """The moment at which any rank holds most."""
        moments = [self._moment(*each) for pp_rank in range(self._pp_size) for each in self._under_way(pp_rank)]
        return max(moments, key=lambda moment: moment.total)

    def _under_way(self, pp_rank: int) -> set[tuple[int, tuple[int, ...]]]:
        """Of the calls of a pp rank: the stage that runs, and how many micro-batches are under way in each."""
        stages = range(pp_rank, len(self.stages), self._pp_size)
        now: Counter[int] = Counter()
        found = set()
        for call in self._orders[pp_rank]:
            now[call.stage] += call.name == "forward"
            found.add((call.stage, tuple(now[stage] for stage in stages)))
            now[call.stage] -= call.name == "backward"
        return found

    def _moment(self, running: int, under_way: Sequence[int]) -> Moment:
        """When the pp rank that has this stage holds most, while that runs."""
        own = range(running % self._pp_size, len(self.stages), self._pp_size)
        number = dict(zip(own, under_way, strict=True))
        num, stages, handed_on = self.num_micro_batches, self.stages, self._handed_on
        moment = stages[running].peak(num, number[running], handed_on[running])
        others = [
            stages[index].between_calls(num, number[index], handed_on[index]) for index in own if index != running
        ]
        held = {name: moment.held[name] + sum(other.get(name, 0) for other in others) for name in CATEGORIES}
        return dataclasses.replace(moment, held=held)

    @cached_property
    def _handed_on(self) -> Sequence[int]:
        """Bytes of a micro-batch that each stage hands to the next one."""
        return [*(stage.received for stage in self.stages[1:]), 0]

    @cached_property
    def _ends(self) -> list[float]:
        """When each pp rank is done with its last backward."""
        left = list(map(deque, self._orders))
        end_of: dict[Call, float] = {}
        now = [0.0] * self._pp_size
        while any(left):
            for pp_rank, calls in enumerate(left):
                while calls and (arrival := self._arrival(calls[0], end_of)) is not None:
                    call = calls.popleft()
                    now[pp_rank] = end_of[call] = max(now[pp_rank], arrival) + self._timeline(call).seconds
        return now

    def _arrival(self, call: Call, end_of: Mapping[Call, float]) -> float | None:
        """When a stage has what a call takes, from that before it or, for a backward, after it; None: not yet known."""
        before = call._replace(stage=call.stage - 1 if call.name == "forward" else call.stage + 1)
        if not 0 <= before.stage < len(self.stages):
            return 0.0
        if before not in end_of:
            return None
        num_bytes = self.stages[max(before.stage, call.stage)].received
        ring = Ring.of_axis(self._pp_size, self.ranks_of_stage, self.hardware)
        return end_of[before] + collectives.send(num_bytes, ring, self.hardware)

    def _timeline(self, call: Call) -> Timeline:
        return self.stages[call.stage].call(call.name, call.number, self.num_micro_batches)

    def _calls(self, pp_rank: int) -> list[Timeline]:
        return list(map(self._timeline, self._orders[pp_rank]))

    def _optimizer_seconds(self, pp_rank: int) -> float:
        return sum(stage.prediction.optimizer_seconds for stage in self._at(pp_rank))

    def _busy_seconds(self, pp_rank: int) -> float:
        return sum(call.seconds for call in self._calls(pp_rank)) + self._optimizer_seconds(pp_rank)

    @cached_property
    def _busiest(self) -> int:
        return max(range(self._pp_size), key=self._busy_seconds)

    @cached_property
    def _lanes(self) -> Mapping[str, float]:
        """Seconds of compute, of each process group, and of copies, in a step of the busiest pp rank."""
        lanes = {COMPUTE: 0.0}
        for call in self._calls(self._busiest):
            for lane, seconds in {COMPUTE: call.compute, **call.sending}.items():
                lanes[lane] = lanes.get(lane, 0.0) + seconds
        return lanes


def orders(pp_size: int, stages_of_rank: int, num_micro_batches: int) -> list[list[Call]]:
    """What each pp rank computes, in order.

    >>> for call in orders(2, 1, 3)[0]:
    ...     print(*call)
    0 forward 0
    0 forward 1
    0 backward 0
    0 forward 2
    0 backward 1
    0 backward 2

    Raises:
        ConfigError: 1F1B has fewer micro-batches than stages, or interleaved 1F1B a number that its rounds, of at least
            as many as there are pp ranks, do not divide.
    """
    if stages_of_rank == 1:
        if num_micro_batches < pp_size:
            raise ConfigError(
                f"a pipeline of {pp_size} stages needs as many micro-batches, and a step has {num_micro_batches}"
            )
        num_ahead = [pp_size - 1 - pp_rank for pp_rank in range(pp_size)]
        of_round = num_micro_batches
    else:
        num_rounds = max(1, num_micro_batches // pp_size)
        if num_micro_batches % num_rounds:
            raise ConfigError(
                f"{stages_of_rank} stages of each rank take micro-batches in {num_rounds} rounds of {pp_size} or "
                f"more, and a step has {num_micro_batches}, which is no multiple of {num_rounds}"
            )
        of_round = num_micro_batches // num_rounds
        num_ahead = [(stages_of_rank - 1) * of_round + 2 * (pp_size - 1 - pp_rank) for pp_rank in range(pp_size)]
    return [
        _order(range(pp_rank, pp_size * stages_of_rank, pp_size), num_micro_batches, of_round, ahead)
        for pp_rank, ahead in enumerate(num_ahead)
    ]


def _order(stages: Sequence[int], num_micro_batches: int, of_round: int, ahead: int) -> list[Call]:
    """A backward follows each forward, but for the first ones.

    Args:
        of_round: how many micro-batches pass a stage before the next one of the rank has its turn.
        ahead: how many forwards are computed before the first that a backward follows.
    """
    forwards = [Call(stage, "forward", number) for stage, number in _in_rounds(stages, num_micro_batches, of_round)]
    last_first = stages[::-1]
    backwards = [
        Call(stage, "backward", number) for stage, number in _in_rounds(last_first, num_micro_batches, of_round)
    ]
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards, strict=False):
        order += pair
    return order + backwards[len(backwards) - ahead :]


def _in_rounds(stages: Sequence[int], num_micro_batches: int, of_round: int) -> Iterator[tuple[int, int]]:
    """Stages and numbers of micro-batches: in each round, so many pass one stage after another."""
    for begin in range(0, num_micro_batches, of_round):
        for stage in stages:
            for number in range(begin, begin + of_round):
                yield stage, number
