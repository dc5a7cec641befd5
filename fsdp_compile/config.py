"""The options of `fsdp_compile`, `shard` and `rewrite`, as values that are validated when they are made."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy

from .costs.hardware import Hardware
from .errors import ConfigError
from .passes.pipeline import Pass

_BACKENDS = ("inductor", "aot_eager")
_LOWERINGS = ("auto", "packed", "grouped")
_KEEPING = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)

Reshard = bool | int
"""Whether a unit is resharded after the forward; a number of ranks shards it again over groups of that size."""


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """What the passes are to do.

    Attributes:
        reshard_after_forward: a bool or number of ranks, or a map from globs over unit names to those; None reshards
            every unit but the one that the forward uses last.
        forward_prefetch: how many units ahead the forward gathers.
        backward_prefetch: how many units ahead the backward gathers, and whether it delays its reductions' waits.
        collective_lowering: "packed", "grouped", or "auto" (grouped on NCCL, packed elsewhere; a plan chooses).
        memory_budget: bytes that a rank may hold during a step; None for no promise.
        hardware: what plans are made for; None leaves the schedule to the options above.
        passes: the user's, which run on the graphs once they are in order.
        poison: whether freed buffers are filled with NaN, to show that nothing reads them.
    """

    reshard_after_forward: Reshard | Mapping[str, Reshard] | None = None
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    collective_lowering: str = "auto"
    memory_budget: int | None = None
    hardware: Hardware | None = None
    passes: tuple[Pass, ...] = ()
    poison: bool = False

    @classmethod
    def of(
        cls,
        strategy: ShardingStrategy,
        reshard_after_forward: object,
        forward_prefetch: object,
        backward_prefetch: object,
        collective_lowering: object,
        memory_budget: object = None,
        hardware: Hardware | None = None,
        passes: object = (),
        poison: bool = False,
    ) -> ScheduleConfig:
        """The configuration from the user's arguments; raises ConfigError for what they cannot mean."""
        if collective_lowering not in _LOWERINGS:
            raise ConfigError(f"collective_lowering is one of {_LOWERINGS}, not {collective_lowering!r}")
        reshard = _reshard(reshard_after_forward)
        if strategy is ShardingStrategy.NO_SHARD and reshard is not None:
            raise ConfigError(f"reshard_after_forward={reshard!r} has no meaning with NO_SHARD: nothing is sharded")
        return cls(
            False if reshard is None and strategy in _KEEPING else reshard,
            _distance("forward_prefetch", forward_prefetch, {}),
            _distance(
                "backward_prefetch",
                backward_prefetch,
                {BackwardPrefetch.BACKWARD_PRE: 1, BackwardPrefetch.BACKWARD_POST: 0, None: 0},
            ),
            str(collective_lowering),
            num_bytes_of(memory_budget),
            hardware,
            _passes(passes),
            poison,
        )

    def reshard_of_unit(self, units: list[str], num_shards: int) -> dict[str, Reshard]:
        """Whether each unit reshards after the forward, for those where that is not left to the passes.

        Args:
            num_shards: the ranks that parameters are sharded over.

        Raises:
            ConfigError: a number of ranks does not divide `num_shards`.
        """
        setting = self.reshard_after_forward
        if setting is None:
            return {}
        if not isinstance(setting, Mapping):
            setting = {"*": setting}
        found = {unit: value for unit in units for glob, value in setting.items() if fnmatchcase(unit, glob)}
        return {unit: _divided(value, num_shards) for unit, value in found.items()}

    def check_globs(self, units: list[str]) -> None:
        """Raise ConfigError for a glob that matches no unit: it would be ignored in silence."""
        if isinstance(self.reshard_after_forward, Mapping):
            for glob in self.reshard_after_forward:
                if not any(fnmatchcase(unit, glob) for unit in units):
                    raise ConfigError(f"reshard_after_forward: {glob!r} matches none of the units {units}")


def _reshard(value: object) -> Reshard | Mapping[str, Reshard] | None:
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    if _is_reshard(value):
        return value  # type: ignore[return-value]
    if isinstance(value, Mapping) and all(isinstance(k, str) and _is_reshard(v) for k, v in value.items()):
        return dict(value)
    raise ConfigError(
        "reshard_after_forward is None, a bool, a number of ranks, or a map of unit globs to bools and numbers, "
        f"not {value!r}"
    )


def _is_reshard(value: object) -> bool:
    return isinstance(value, int) and value >= 0 and (value > 0 or isinstance(value, bool))


def _divided(value: Reshard, num_shards: int) -> Reshard:
    """`value`, where a number of ranks that means all or none of them becomes True or False."""
    if isinstance(value, bool):
        return value
    if num_shards % value:
        raise ConfigError(f"reshard_after_forward={value} does not divide the {num_shards} ranks that are sharded over")
    return value == num_shards if value in (1, num_shards) else value


def _passes(passes: object) -> tuple[Any, ...]:
    """A user's passes; dataclasses, because all ranks compare their options as text."""
    if not isinstance(passes, (list, tuple)):
        raise ConfigError(f"passes is a list of passes, not {passes!r}")
    for each in passes:
        if not callable(each) or not dataclasses.is_dataclass(each) or isinstance(each, type):
            raise ConfigError(f"a pass is an object of a dataclass, called with a graph module, not {each!r}")
    return tuple(passes)


def _distance(name: str, value: object, meanings: Mapping[object, int]) -> int:
    if isinstance(value, str):
        if value == "auto":
            return 1
    elif isinstance(value, (bool, int)):
        if value >= 0:
            return int(value)
    elif value in meanings:
        return meanings[value]
    allowed = ", ".join(["'auto'", "an int >= 0", "a bool", *map(str, meanings)])
    raise ConfigError(f"{name} is one of {allowed}, not {value!r}")


@dataclasses.dataclass(frozen=True)
class CompileConfig:
    """What is passed on to torch.compile; `backend` is what compiles the rewritten graphs."""

    backend: str = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.backend not in _BACKENDS:
            raise ConfigError(f"backend is one of {_BACKENDS}, not {self.backend!r}")
        if not isinstance(self.fullgraph, bool):
            raise ConfigError(f"fullgraph is a bool, not {self.fullgraph!r}")
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise ConfigError(f"dynamic is None or a bool, not {self.dynamic!r}")
        if self.options and self.backend != "inductor":
            raise ConfigError(f"options are Inductor's; backend={self.backend!r} has none")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients of several ranks become one: the operator of the collectives, and what divides its result."""

    operator: str = "avg"
    divisor: float = 1.0

    @classmethod
    def of(cls, gradient_reduction: object) -> Reduction:
        """From the user's "mean", "sum", or number, which divides the sum."""
        if isinstance(gradient_reduction, str) and gradient_reduction in ("mean", "sum"):
            return cls("avg" if gradient_reduction == "mean" else "sum")
        return cls.divided_by(gradient_reduction, "gradient_reduction is 'mean', 'sum', or")

    @classmethod
    def divided_by(cls, factor: object, refusal: str = "factor is") -> Reduction:
        """The sum, divided by a number; what is none is refused in words that begin with `refusal`."""
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if is_number and 0 < factor < math.inf:  # type: ignore[operator]
            return cls("sum", float(factor))  # type: ignore[arg-type]
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
    def of(cls, offload_policy: object) -> OffloadConfig:
        """From torch's `CPUOffloadPolicy`, `OffloadPolicy` (off) or `CPUOffload`, or None."""
        if isinstance(offload_policy, CPUOffloadPolicy):
            return cls(True, offload_policy.pin_memory)
        if isinstance(offload_policy, CPUOffload):
            return cls(offload_policy.offload_params, offload_policy.offload_params)
        if offload_policy is None or type(offload_policy) is OffloadPolicy:
            return cls()
        raise ConfigError(
            "offload_policy is None, or a CPUOffloadPolicy or CPUOffload of torch.distributed.fsdp, "
            f"not {offload_policy!r}"
        )


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def num_bytes_of(memory_budget: object) -> int | None:
    """Bytes from a number, or from text such as "16 GiB"; raises ConfigError for anything else."""
    if memory_budget is None:
        return None
    number: object = memory_budget
    if isinstance(memory_budget, str) and (match := re.fullmatch(r"([\d.]+)\s*([KMG]i?B|B)", memory_budget.strip())):
        with contextlib.suppress(ValueError):
            number = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(number, int) and not isinstance(number, bool) and number > 0:
        return number
    raise ConfigError(f"memory_budget is a positive number of bytes, or text such as '16 GiB', not {memory_budget!r}")
