"""The options of `fsdp_compile`, `shard` and `rewrite`: each is spelled once, and checked where it is made."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Shard

from .checks import Auto, check_bool, check_call, is_auto, listed
from .costs.hardware import Hardware
from .environment import hardware_by_environment, poisons
from .errors import ConfigError
from .layout.communication import CommunicationDtype, check_communication
from .layout.options import GradientReduction, OffloadConfig, check_strategy
from .passes.pipeline import Pass
from .planning.options import ScheduleConfig
from .planning.strategies import check_open

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked for. `fsdp_compile` explains every option.

    Attributes:
        schedule: what the passes are to do, as far as the strategy leaves it open.
        reduction: how gradients of several ranks become one.
        offload: where shards are kept.
        communication: in which form units send what they send, by glob over their names.
    """

    process_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None
    auto_wrap_policy: Any = "auto"
    sharding_strategy: ShardingStrategy | Auto = ShardingStrategy.FULL_SHARD
    reshard_after_forward: Any = None
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None
    mp_policy: Any = None
    communication_dtype: Any = "auto"
    offload_policy: Any = None
    backward_prefetch: Any = "auto"
    forward_prefetch: Any = "auto"
    collective_lowering: str = "auto"
    collective_pieces: int | Auto = "auto"
    memory_budget: int | str | None = None
    hardware: Hardware | str | bool | None = "auto"
    example_inputs: Sequence[Any] | torch.Tensor | None = None
    ignored_params: Iterable[nn.Parameter] | None = None
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool = True
    gradient_reduction: str | float = "mean"
    check_gradients: bool = False
    passes: Sequence[Pass] = ()
    schedule: ScheduleConfig = dataclasses.field(init=False)
    reduction: GradientReduction = dataclasses.field(init=False)
    offload: OffloadConfig = dataclasses.field(init=False)
    communication: Mapping[str, CommunicationDtype] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Raise ConfigError for what cannot be meant, whatever the model."""
        check_bool("sync_module_states", self.sync_module_states)
        check_bool("check_gradients", self.check_gradients)
        if self.param_init_fn is not None:
            if not callable(self.param_init_fn) or isinstance(self.param_init_fn, type):
                raise ConfigError(f"param_init_fn is a function that takes a module, not {self.param_init_fn!r}")
            check_call("param_init_fn", self.param_init_fn, "module")
        if (place := self.shard_placement_fn) is not None:
            if not callable(place) or isinstance(place, (type, nn.Module)):
                raise ConfigError(f"shard_placement_fn is a function that takes a parameter, not {place!r}")
            check_call("shard_placement_fn", place, "parameter")
        ignored = self.ignored_params
        self._set("ignored_params", [] if ignored is None else listed("ignored_params", ignored, "parameters"))
        if isinstance(self.auto_wrap_policy, Iterator):  # it may be read several times
            self._set("auto_wrap_policy", list(self.auto_wrap_policy))
        self._set("communication", check_communication(self.communication_dtype))
        self._set("offload", OffloadConfig.of(self.offload_policy))
        self._set("reduction", GradientReduction.of(self.gradient_reduction))
        schedule = ScheduleConfig.of(
            reshard_after_forward=self.reshard_after_forward,
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            collective_lowering=self.collective_lowering,
            collective_pieces=self.collective_pieces,
            memory_budget=self.memory_budget,
            hardware=self.hardware,
            passes=self.passes,
            poison=poisons(),
            pin_memory=self.offload.pin_memory,
            plans_by_default=hardware_by_environment() != "0",
        )
        if self.is_auto:
            check_open(self.reshard_after_forward, self.offload)
        self._set("schedule", schedule if self.is_auto else schedule.by_strategy(self.strategy))

    @property
    def is_auto(self) -> bool:
        """Whether the strategy is yet to be chosen."""
        return is_auto(self.sharding_strategy)

    @property
    def strategy(self) -> ShardingStrategy:
        return check_strategy(self.sharding_strategy)

    @property
    def ignored(self) -> list[nn.Parameter]:
        return list(self.ignored_params or ())

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _spelled(kind: type, without: Sequence[str]) -> dict[str, dataclasses.Field[Any]]:
    fields = dataclasses.fields(kind)
    return {field.name: field for field in fields if field.init and field.name not in without}


def takes(*kinds: type, without: Sequence[str] = (), **defaults: Any) -> Callable[[_Function], _Function]:
    """Give a function that takes `**arguments` a signature that spells them: the fields of these dataclasses.

    Args:
        without: fields that it does not take.
        defaults: where they are not those of the fields.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        parameters = [each for each in signature.parameters.values() if each.name != "arguments"]
        for kind in kinds:
            for name, field in _spelled(kind, without).items():
                default = defaults.get(name, field.default)
                parameters.append(
                    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)
                )
        parameters.sort(key=lambda each: each.kind)
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def taken(kind: type[_T], given: dict[str, Any], without: Sequence[str] = ()) -> _T:
    """The options that are among the arguments `given`; they are removed from those."""
    return kind(**{name: given.pop(name) for name in _spelled(kind, without) if name in given})


def options_of(function: str, given: dict[str, Any]) -> Options:
    """The options that are the arguments `given`; TypeError for one that the function has not."""
    known = _spelled(Options, ())
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{meant}")
    return Options(**given)
