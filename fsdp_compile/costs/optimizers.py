"""Optimizers: what they keep and move for every byte of a shard."""

from __future__ import annotations

import dataclasses

import torch.fx

from ..errors import ConfigError
from ..passes import analysis, ops
from .nodes import num_bytes, traffic_of_update
from .work import Work


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """What an optimizer keeps and moves for every byte of a shard.

    Attributes:
        states: bytes of states.
        traffic: bytes that a step reads and writes.
    """

    states: float
    traffic: float

    @classmethod
    def of(cls, states: int) -> Optimizer:
        return cls(states, traffic_of_update(states))


OPTIMIZERS = {"sgd": Optimizer.of(0), "momentum": Optimizer.of(1), "adam": Optimizer.of(2)}
"""By the number of their states, which have the dtype of their parameters."""


def find_optimizer(optimizer: str) -> Optimizer:
    """One of `OPTIMIZERS`; raises ConfigError if there is none of this name."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    return OPTIMIZERS[optimizer]


def state_bytes(work: Work, optimizer: Optimizer) -> float:
    """Bytes of the states of an optimizer; of one that steps in the backward, as many as its updates say."""
    updates = ops.updates(work.backward.graph) if work.backward else []
    updated = sum(ops.argument(update, "states") * num_bytes(update.args[0].meta["val"]) for update in updates)  # type: ignore[union-attr]
    return updated + optimizer.states * gradient_bytes(work)


def gradient_bytes(work: Work) -> int:
    """Bytes of the gradients that the backward returns, which are as large as what the optimizer updates after it.

    Of what is kept for a later step, which is full, those of this rank's part.
    """
    returned = analysis.outputs(work.backward.graph) if work.backward else []
    return sum(_bytes_of_part(node) for node in returned if node is not None)


def _bytes_of_part(gradient: torch.fx.Node) -> int:
    size = num_bytes(gradient.meta["val"])
    return size // ops.argument(gradient, "world_size") if ops.is_call(gradient, ops.PACK) else size
