"""Options of the schedule: what the passes are to do, and what a plan is for."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from ..checks import check_call, check_choice, is_auto
from ..costs.hardware import Hardware, find_hardware
from ..errors import ConfigError
from ..layout.globs import is_named
from ..passes.pipeline import Pass
from ..passes.plan import PrefetchList

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
        forward_lists, backward_lists: units that are gathered where others are used, whatever the two numbers say.
        reductions: how many may be under way at once; None is one, or none where the backward gathers none ahead.
        collective_lowering: "packed", "grouped", or "auto" (grouped on NCCL, packed elsewhere; a plan chooses).
        memory_budget: bytes that a rank may hold during a step; None for no promise.
        hardware: what plans are made for; None leaves the schedule to the options above.
        is_at_hand: whether plans are made, though nobody has asked for one, for what the ranks run on, once that is
            known. They hold no more than the schedule without a plan.
        passes: the user's, which run on the graphs once they are in order.
        poison: whether freed buffers are filled with NaN, to show that nothing reads them.
        pin_memory: whether offloaded gradients are copied to pinned memory.
        updates: how many states the optimizer has that steps in the backward; None if none does.
        pieces: into how many the model's own collectives are decomposed; None leaves that to a plan.
    """

    reshard_after_forward: Reshard | Mapping[str, Reshard] | None = None
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    collective_lowering: str = "auto"
    memory_budget: int | None = None
    hardware: Hardware | None = None
    passes: tuple[Pass, ...] = ()
    poison: bool = False
    pin_memory: bool = True
    forward_lists: tuple[PrefetchList, ...] = ()
    backward_lists: tuple[PrefetchList, ...] = ()
    reductions: int | None = None
    is_at_hand: bool = False
    updates: int | None = None
    pieces: int | None = None

    def without_updates(self) -> ScheduleConfig:
        """The same, with no optimizer that steps in the backward."""
        return dataclasses.replace(self, updates=None)

    @classmethod
    def of(
        cls,
        *,
        reshard_after_forward: object,
        forward_prefetch: object,
        backward_prefetch: object,
        collective_lowering: object,
        collective_pieces: object,
        memory_budget: object,
        hardware: Hardware | str | bool | None,
        passes: object,
        poison: bool,
        pin_memory: bool,
        plans_by_default: bool,
    ) -> ScheduleConfig:
        """The configuration from the user's arguments; raises ConfigError for what they cannot mean."""
        check_choice("collective_lowering", collective_lowering, _LOWERINGS)
        own_passes, budget = _passes(passes), num_bytes_of(memory_budget)
        is_left_open = budget is None and not own_passes and is_auto(forward_prefetch) and is_auto(backward_prefetch)
        return cls(
            _reshard(reshard_after_forward),
            _distance("forward_prefetch", forward_prefetch, {}),
            _distance(
                "backward_prefetch",
                backward_prefetch,
                {BackwardPrefetch.BACKWARD_PRE: 1, BackwardPrefetch.BACKWARD_POST: 0, None: 0},
            ),
            str(collective_lowering),
            budget,
            None if hardware is None or hardware is False or is_auto(hardware) else find_hardware(hardware),
            own_passes,
            poison,
            pin_memory,
            is_at_hand=is_auto(hardware) and is_left_open and plans_by_default,
            pieces=_pieces(collective_pieces),
        )

    def unplanned(self, what: str) -> ScheduleConfig:
        """The configuration for a schedule that goes by the options; ConfigError if the user has asked for a plan.

        Args:
            what: was called that contradicts a plan.
        """
        if self.hardware is not None and not self.is_at_hand:
            raise ConfigError(f"{what} would contradict the schedule, which is planned: leave out hardware and budget")
        return dataclasses.replace(self, hardware=None, is_at_hand=False)

    def by_strategy(self, strategy: ShardingStrategy) -> ScheduleConfig:
        """The configuration with what the strategy says of resharding; ConfigError if both say something."""
        reshard = self.reshard_after_forward
        if strategy is ShardingStrategy.NO_SHARD and reshard is not None:
            raise ConfigError(f"reshard_after_forward={reshard!r} has no meaning with NO_SHARD: nothing is sharded")
        keeps = reshard is None and strategy in _KEEPING
        return dataclasses.replace(self, reshard_after_forward=False) if keeps else self

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
        found = {unit: value for unit in units for glob, value in setting.items() if is_named(unit, glob)}
        return {unit: _divided(value, num_shards) for unit, value in found.items()}

    def check_globs(self, units: list[str]) -> None:
        """Raise ConfigError for a glob that matches no unit: it would be ignored in silence."""
        if isinstance(self.reshard_after_forward, Mapping):
            for glob in self.reshard_after_forward:
                if not any(is_named(unit, glob) for unit in units):
                    raise ConfigError(f"reshard_after_forward: {glob!r} matches none of the units {units}")


def _reshard(value: object) -> Reshard | Mapping[str, Reshard] | None:
    if value is None or is_auto(value):
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
        if not dataclasses.is_dataclass(each) or isinstance(each, type) or not callable(each):
            raise ConfigError(f"passes: a pass is an object of a dataclass, called with a graph module, not {each!r}")
        check_call("passes", each, "gm")
    return tuple(passes)


def _distance(name: str, value: object, meanings: Mapping[object, int]) -> int:
    if is_auto(value):
        return 1
    if isinstance(value, int) and value >= 0:
        return int(value)
    for meaning, distance in meanings.items():
        if value is meaning:
            return distance
    allowed = ", ".join(["'auto'", "an int >= 0", "a bool", *map(str, meanings)])
    raise ConfigError(f"{name} is one of {allowed}, not {value!r}")


def _pieces(value: object) -> int | None:
    if is_auto(value):
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise ConfigError(f"collective_pieces is 'auto' or a positive int, not {value!r}")


_MOST_BYTES = 2**80
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def num_bytes_of(memory_budget: object) -> int | None:
    """Bytes from a number, or from text such as "16 GiB"; raises ConfigError for anything else."""
    if memory_budget is None:
        return None
    number: object = memory_budget
    if isinstance(memory_budget, str) and (match := re.fullmatch(r"([\d.]+)\s*([KMG]i?B|B)", memory_budget.strip())):
        with contextlib.suppress(ValueError, OverflowError):
            number = int(float(match[1]) * _UNITS[match[2]])
    if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= _MOST_BYTES:
        return number
    raise ConfigError(f"memory_budget is a positive number of bytes, or text such as '16 GiB', not {memory_budget!r}")
