"""Strategies: which of them a model is sharded by, where the user leaves it open.

Every candidate is rewritten, planned and predicted, as if it had been asked for. The fastest that fits is taken; of
those that are as fast, the simplest. A candidate whose shards and states alone do not fit is only rewritten where no
other fits either.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from ..checks import is_auto
from ..costs.hardware import Hardware
from ..costs.memory import Moment
from ..costs.optimizers import find_optimizer
from ..costs.predict import Prediction, bytes_text, predict, time_text
from ..errors import ConfigError
from ..graphs import RewrittenGraphs
from ..layout.options import OffloadConfig
from ..runtime.agreement import agreement_of
from ..runtime.comparison import Line
from .step_plans import Goal

WorldSize = int | tuple[int, int] | DeviceMesh | Mapping[str, DeviceMesh]

_SIMPLE = 1.01  # strategies within this factor are as fast as each other; then the simpler one is better

STRATEGIES_OF_ALL_RANKS = (ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD)
"""Those that any number of ranks can have, from the simplest."""


def check_example_inputs(strategy: object, example_inputs: object) -> None:
    """Raise ConfigError unless example_inputs are given with "auto", and only with it."""
    if not is_auto(strategy):
        if example_inputs is not None:
            raise ConfigError("example_inputs are what sharding_strategy='auto' is chosen for; nothing else reads them")
    elif not isinstance(example_inputs, (tuple, list, torch.Tensor)):
        found = "are missing" if example_inputs is None else f"are of type {type(example_inputs).__name__}"
        raise ConfigError(
            "sharding_strategy='auto' needs example_inputs, the positional arguments of a call as a tuple or list (on "
            f"the meta device, if you like), because it is chosen before the model is first called; they {found}"
        )


def check_open(reshard_after_forward: object, offload: OffloadConfig) -> None:
    """Raise ConfigError for options that decide what "auto" leaves open, or that no strategy is predicted with."""
    if reshard_after_forward is not None and not is_auto(reshard_after_forward):
        raise ConfigError(
            "sharding_strategy='auto' chooses what is resharded after the forward, and "
            f"reshard_after_forward={reshard_after_forward!r} says what is: leave it out, or give a strategy"
        )
    if offload.is_on:
        raise ConfigError("sharding_strategy='auto' with offload_policy is not supported: give a strategy")


class Step(Protocol):
    """What is predicted of a step."""

    @property
    def seconds(self) -> float: ...

    @property
    def peak(self) -> Moment: ...


P = TypeVar("P", bound=Step)


class Rewrites(Protocol):
    """What rewrites a call of a model, and says what its shards take (`rewriting.Rewriter`)."""

    def __call__(
        self, *, world_size: WorldSize, sharding_strategy: ShardingStrategy, hardware: Hardware | None = None
    ) -> RewrittenGraphs: ...

    def shard_bytes(self, *, world_size: WorldSize, sharding_strategy: ShardingStrategy) -> tuple[int, int]: ...


@dataclasses.dataclass(frozen=True)
class Candidate(Generic[P]):
    """A strategy that may be chosen.

    Attributes:
        predict: says what a step by it takes.
        shard_bytes: says how many bytes a rank's shards take, and how many of these are trained.
        optimizer: whose states a rank holds.
    """

    predict: Callable[[], P]
    shard_bytes: Callable[[], tuple[int, int]]
    optimizer: str

    @property
    def least(self) -> float:
        """Bytes of shards and states of the optimizer, which a rank holds all the time."""
        held, trained = self.shard_bytes()
        return held + find_optimizer(self.optimizer).states * trained


def candidates(
    rewrite: Rewrites, world_size: WorldSize, goal: Goal, ranks_per_node: int | None, optimizer: str = "adam"
) -> dict[ShardingStrategy, Candidate[Prediction]]:
    """The strategies that `world_size` ranks can have, from the simplest.

    Args:
        world_size: a pair (replicas, ranks to shard over) or a mesh is the same for every strategy.
        ranks_per_node: that hybrid sharding shards over; None for no hybrid sharding.
    """
    sizes: dict[ShardingStrategy, WorldSize] = dict.fromkeys(STRATEGIES_OF_ALL_RANKS, world_size)
    if isinstance(world_size, int) and ranks_per_node and 1 < ranks_per_node < world_size:
        num_nodes, left_over = divmod(world_size, ranks_per_node)
        if not left_over:
            sizes[ShardingStrategy.HYBRID_SHARD] = (num_nodes, ranks_per_node)
    # The budget as the memory of the hardware: what does not fit is planned to need least, and is no error.
    hardware = dataclasses.replace(goal.hardware, memory=goal.memory_budget or goal.hardware.memory)

    def predicted(strategy: ShardingStrategy, size: WorldSize) -> Prediction:
        graphs = rewrite(world_size=size, sharding_strategy=strategy, hardware=hardware)
        return predict(graphs, goal.hardware, optimizer=optimizer, compiler=goal.compiler)

    return {
        strategy: Candidate(
            partial(predicted, strategy, size),
            partial(rewrite.shard_bytes, world_size=size, sharding_strategy=strategy),
            optimizer,
        )
        for strategy, size in sizes.items()
    }


@dataclasses.dataclass(frozen=True)
class Choice(Generic[P]):
    """A strategy, what a step by it is predicted to take, and two sentences that say why it was chosen."""

    strategy: ShardingStrategy
    prediction: P
    reason: str


def best_strategy(candidates: Mapping[ShardingStrategy, Candidate[P]], goal: Goal) -> Choice[P]:
    """The fastest strategy whose predicted peak fits; without a memory budget, else the one that needs least.

    Raises:
        ConfigError: none fits into the memory budget.
    """

    def predicted(strategy: ShardingStrategy) -> _Predicted[P]:
        return _Predicted(strategy, candidates[strategy].predict(), goal.limit)

    least = {strategy: candidate.least for strategy, candidate in candidates.items()}
    found = {strategy: predicted(strategy) for strategy in candidates if least[strategy] <= goal.limit}
    if not any(each.fits for each in found.values()):
        found = {strategy: found.get(strategy) or predicted(strategy) for strategy in candidates}
    texts = {
        strategy: found[strategy].text
        if strategy in found
        else f"{strategy.name} {bytes_text(least[strategy])} of shards and states, does not fit"
        for strategy in candidates
    }
    fitting = [each for each in found.values() if each.fits]
    limit = bytes_text(goal.limit)
    if not fitting:
        if goal.memory_budget is not None:
            raise ConfigError(
                f"memory_budget of {bytes_text(goal.memory_budget)}: no sharding strategy fits into the {limit} of it "
                f"that may be planned. They need: {'; '.join(texts.values())}. More ranks, fewer rows a rank, or "
                "activation checkpointing would help"
            )
        best = min(found.values(), key=lambda each: each.peak)
        why = f"needs least, and none fits into the {limit} of {goal.hardware.name} that may be planned"
        return best.chosen(why, texts)
    fastest = min(fitting, key=lambda each: each.seconds)
    best = next(each for each in fitting if each.seconds <= _SIMPLE * fastest.seconds)
    why = f"is the fastest on {goal.hardware.name} that fits into {limit}"
    if best is not fastest:
        why = f"is the simplest of the fastest on {goal.hardware.name} that fit into {limit}"
    return best.chosen(why, texts)


@dataclasses.dataclass(frozen=True)
class _Predicted(Generic[P]):
    strategy: ShardingStrategy
    prediction: P
    limit: int

    def chosen(self, why: str, texts: Mapping[ShardingStrategy, str]) -> Choice[P]:
        others = "; ".join(text for strategy, text in texts.items() if strategy is not self.strategy)
        reason = f"{self.strategy.name} {why}: {self.numbers}."
        return Choice(self.strategy, self.prediction, f"{reason} The others: {others}." if others else reason)

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def peak(self) -> int:
        return self.prediction.peak.total

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @property
    def numbers(self) -> str:
        return f"{time_text(self.seconds)} a step, {bytes_text(self.peak)} at the peak"

    @property
    def text(self) -> str:
        return f"{self.strategy.name} {self.numbers}{'' if self.fits else ', does not fit'}"


def first_ranks_choice(mesh: DeviceMesh, choose: Callable[[], Choice[Prediction]]) -> tuple[ShardingStrategy, str]:
    """What `choose` returns on the first rank of the mesh, and why. Every rank of the mesh calls this.

    Raises:
        ConfigError, CaptureError: as `choose`, on all ranks.
        RankError: a rank does not choose, or the first has failed otherwise.
    """

    def choice() -> str:
        chosen = choose()
        return json.dumps([chosen.strategy.name, chosen.reason])

    agreement = agreement_of(mesh)
    statement = [Line("options: sharding_strategy='auto'")]
    made = choice() if agreement is None else agreement.decided_by_first(statement, choice)
    name, reason = json.loads(made)
    return ShardingStrategy[name], reason
