"""Collectives that the model calls itself, such as those of tensor parallelism: which they are, and what they take.

DTensor waits for each of them where it starts, and compute stands still meanwhile. Each is priced as a kernel, by the
ring of its process group (`collectives.py`), less what is computed before its wait, where a pass
(`passes/overlap_model_collectives.py`) moves that. What is gathered and reduced beside it does not slow it down.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.fx

from ..passes import ops
from ..runtime.groups import ranks_of_group
from . import collectives
from .arithmetic import largest
from .collectives import Ring
from .hardware import Hardware

_PRICE: dict[str, Callable[[float, Ring, Hardware], float]] = {
    "all_gather_into_tensor": collectives.all_gather,
    "all_gather_into_tensor_coalesced": collectives.all_gather,
    "all_reduce": collectives.all_reduce,
    "all_reduce_coalesced": collectives.all_reduce,
    "all_to_all_single": collectives.all_to_all,
    "reduce_scatter_tensor": collectives.reduce_scatter,
    "reduce_scatter_tensor_coalesced": collectives.reduce_scatter,
    "shard_dim_alltoall": collectives.all_to_all,
}


@dataclasses.dataclass(frozen=True)
class ModelCollective:
    """One collective of the model.

    Attributes:
        operator: its name, as in "all_reduce".
        ranks: of its process group; None where no group of this process has its name any more.
    """

    operator: str
    ranks: tuple[int, ...] | None

    @classmethod
    def of(cls, node: torch.fx.Node) -> ModelCollective | None:
        """What `node` calls; None if that is no collective of the model."""
        if not ops.is_functional_collective(node):
            return None
        group: Any = node.args[-1]
        ranks = ranks_of_group(group if isinstance(group, str) else group.group_name)
        operator = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
        return cls(operator, None if ranks is None else tuple(ranks))

    def seconds(self, num_bytes: float, hardware: Hardware) -> float:
        """Seconds until this is done; nothing for a group that is gone.

        Args:
            num_bytes: of its input or its output, whichever is larger.
        """
        if self.ranks is None or len(self.ranks) == 1:
            return 0.0
        ring = Ring.of_axis(len(self.ranks), self.ranks[1] - self.ranks[0], hardware)
        return _PRICE.get(self.operator, collectives.broadcast)(num_bytes, ring, hardware)


def shown(alone: float, computed: float, hardware: Hardware) -> float:
    """How much longer a step takes with a collective that takes `alone` seconds, and `computed` seconds run beside it.

        max(alone - computed, (1 - 1 / c) alone)

    The first is what is not done after that, the second how much slower that is meanwhile (`Hardware.contention`, c).
    """
    seconds: float = largest(alone - computed, (1 - 1 / hardware.contention) * alone)
    return seconds
