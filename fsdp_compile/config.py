"""The options of `fsdp_compile`, `shard` and `rewrite`, as values that are validated when they are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from .errors import ConfigError

_BACKENDS = ("inductor", "aot_eager")
_LOWERINGS = ("auto", "packed", "grouped")
_REDUCTIONS = {"mean": "avg", "sum": "sum"}


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """What the passes are to do.

    Attributes:
        reshard_after_forward: True, False, or a map from globs over unit names to bool; None reshards every unit
            but the one that the forward uses last.
        forward_prefetch: how many units ahead the forward gathers.
        backward_prefetch: how many units ahead the backward gathers, and whether it delays its reductions' waits.
        collective_lowering: "packed", "grouped", or "auto" (grouped on NCCL, packed elsewhere).
    """

    reshard_after_forward: bool | Mapping[str, bool] | None = None
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    collective_lowering: str = "auto"

    @classmethod
    def of(
        cls,
        reshard_after_forward: object,
        forward_prefetch: object,
        backward_prefetch: object,
        collective_lowering: object,
    ) -> ScheduleConfig:
        """The configuration from the user's arguments; raises ConfigError for what they cannot mean."""
        if collective_lowering not in _LOWERINGS:
            raise ConfigError(f"collective_lowering is one of {_LOWERINGS}, not {collective_lowering!r}")
        return cls(
            _reshard(reshard_after_forward),
            _distance("forward_prefetch", forward_prefetch, {}),
            _distance(
                "backward_prefetch",
                backward_prefetch,
                {BackwardPrefetch.BACKWARD_PRE: 1, BackwardPrefetch.BACKWARD_POST: 0, None: 0},
            ),
            str(collective_lowering),
        )

    def reshard_of_unit(self, units: list[str]) -> dict[str, bool]:
        """Whether each unit reshards after the forward, for those where that is not left to the passes."""
        setting = self.reshard_after_forward
        if setting is None:
            return {}
        if isinstance(setting, bool):
            return dict.fromkeys(units, setting)
        return {unit: value for unit in units for glob, value in setting.items() if fnmatchcase(unit, glob)}

    def check_globs(self, units: list[str]) -> None:
        """Raise ConfigError for a glob that matches no unit: it would be ignored in silence."""
        if isinstance(self.reshard_after_forward, Mapping):
            for glob in self.reshard_after_forward:
                if not any(fnmatchcase(unit, glob) for unit in units):
                    raise ConfigError(f"reshard_after_forward: {glob!r} matches none of the units {units}")


def _reshard(value: object) -> bool | Mapping[str, bool] | None:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, bool) for k, v in value.items()):
        return dict(value)
    raise ConfigError(f"reshard_after_forward is None, a bool, or a map of unit globs to bool, not {value!r}")


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


def reduction_of(gradient_reduction: object) -> str:
    """The reduction that collectives use, from `gradient_reduction`."""
    if gradient_reduction not in _REDUCTIONS:
        raise ConfigError(f"gradient_reduction is one of {tuple(_REDUCTIONS)}, not {gradient_reduction!r}")
    return _REDUCTIONS[str(gradient_reduction)]


def refuse_unsupported(
    sharding_strategy: object, mp_policy: object, offload_policy: object, memory_budget: object, ignored_params: object
) -> None:
    """Raise ConfigError for options that this version does not have, rather than ignore them."""
    if sharding_strategy is not ShardingStrategy.FULL_SHARD:
        raise ConfigError(
            f"sharding_strategy={sharding_strategy!r} is not supported by this version: FULL_SHARD is, and a 2-D mesh "
            "(replicate, shard) for hybrid sharding, and reshard_after_forward=False for SHARD_GRAD_OP"
        )
    others = {
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "memory_budget": memory_budget,
        "ignored_params": ignored_params,
    }
    for name, value in others.items():
        if value is not None:
            raise ConfigError(f"{name} is not supported by this version; leave it None")
