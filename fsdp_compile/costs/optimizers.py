"""Optimizers: what they keep and move for every byte of a shard."""

from __future__ import annotations

import dataclasses

from ..errors import ConfigError
from ..passes import analysis
from .nodes import num_bytes
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


OPTIMIZERS = {"sgd": Optimizer(0, 3), "momentum": Optimizer(1, 5), "adam": Optimizer(2, 7)}
"""SGD reads parameter and gradient and writes the parameter; a state is read and written besides. States have the dtype
of their parameters."""


def find_optimizer(optimizer: str) -> Optimizer:
    """One of `OPTIMIZERS`; raises ConfigError if there is none of this name."""
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise ConfigError(f"optimizer is one of {', '.join(OPTIMIZERS)}, not {optimizer!r}")
    return OPTIMIZERS[optimizer]


def gradient_bytes(work: Work) -> int:
    """Bytes of the gradients that the backward returns, which are as large as what the optimizer updates."""
    returned = analysis.outputs(work.backward.graph) if work.backward else []
    return sum(num_bytes(node.meta["val"]) for node in returned if node is not None)
