"""Options of the layout: by which strategy, where shards are kept, and how gradients of several ranks become one."""

from __future__ import annotations

import contextlib
import dataclasses
import math

from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

from ..checks import check_bool
from ..errors import ConfigError


@dataclasses.dataclass(frozen=True)
class GradientReduction:
    """How gradients of several ranks become one: the operator of the collectives, and what divides its result."""

    operator: str = "avg"
    divisor: float = 1.0

    @classmethod
    def of(cls, gradient_reduction: object) -> GradientReduction:
        """From the user's "mean", "sum", or number, which divides the sum."""
        if isinstance(gradient_reduction, str) and gradient_reduction in ("mean", "sum"):
            return cls("avg" if gradient_reduction == "mean" else "sum")
        return cls.divided_by(gradient_reduction, "gradient_reduction is 'mean', 'sum', or")

    @classmethod
    def mean_over(cls, num_ranks: int) -> GradientReduction:
        """The mean over so many ranks, by a sum and a division."""
        return cls("sum", num_ranks)

    @classmethod
    def divided_by(cls, factor: object, refusal: str = "factor is") -> GradientReduction:
        """The sum, divided by a number; what is none is refused in words that begin with `refusal`."""
        if isinstance(factor, (int, float)) and not isinstance(factor, bool):
            with contextlib.suppress(OverflowError):
                divisor = float(factor)
                if 0 < divisor < math.inf:
                    return cls("sum", divisor)
        raise ConfigError(f"{refusal} a positive number that divides the sum, not {factor!r}")


def check_strategy(strategy: object) -> ShardingStrategy:
    """`strategy` if it is one; raises ConfigError if not."""
    if not isinstance(strategy, ShardingStrategy):
        names = ", ".join(each.name for each in ShardingStrategy)
        raise ConfigError(
            f"sharding_strategy is a ShardingStrategy of torch.distributed.fsdp ({names}) or 'auto', not {strategy!r}"
        )
    return strategy


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """Whether shards, gradients and with them optimizer states live on the CPU, and whether in pinned memory."""

    is_on: bool = False
    pin_memory: bool = False

    @classmethod
    def of(cls, offload_policy: object, name: str = "offload_policy") -> OffloadConfig:
        """From torch's `CPUOffloadPolicy`, `OffloadPolicy` (off) or `CPUOffload`, or None; errors say `name`."""
        if isinstance(offload_policy, CPUOffloadPolicy):
            check_bool(f"{name}: pin_memory", offload_policy.pin_memory)
            return cls(True, offload_policy.pin_memory)
        if isinstance(offload_policy, CPUOffload):
            check_bool(f"{name}: offload_params", offload_policy.offload_params)
            return cls(offload_policy.offload_params, offload_policy.offload_params)
        if offload_policy is None or type(offload_policy) is OffloadPolicy:
            return cls()
        raise ConfigError(
            f"{name} is None, or a CPUOffloadPolicy or CPUOffload of torch.distributed.fsdp, not {offload_policy!r}"
        )
