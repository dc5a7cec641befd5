"""What FSDP2 calls the state of a module, as far as torch's pipelines drive it: what was kept is reduced.

`torch.distributed.fsdp.fully_shard.state(module)` finds it, where torch keeps the states of composable functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard

from ..runtime.gradients import reduce_leftovers
from ..runtime.wrappers import ShardedHere, refuse_fully_shard
from .own_units import OwnUnits, own_units_below, own_units_of


@dataclasses.dataclass(frozen=True)
class UnitState:
    """Of one sharded module. Names are torch's."""

    module: nn.Module

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        own = own_units_of(self.module)
        return [ParamGroup(own)] if own is not None and own.shards else []

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> AllStates:
        return AllStates([UnitState(own.modules[0]) for own in own_units_below(self.module)])

    def _root_post_backward_final_callback(self) -> None:
        """After the last backward of a step; nothing is left to wait for.

        Raises:
            RuntimeError: no backward has left a gradient in any parameter.
        """
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            raise RuntimeError(
                f"no backward has computed gradients of {type(self.module).__name__}: a compiled backward cannot be "
                "split into one for inputs and one for weights, as zero bubble schedules do; 1F1B does not"
            )


@dataclasses.dataclass(frozen=True)
class AllStates:
    all_states: list[UnitState]


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """The units of one call."""

    own: OwnUnits

    def post_backward(self, *_: Any) -> None:
        """Reduce what was kept, if it is not to be kept on."""
        if self.own.shards and (sharding := self.own.shards[0].sharding) is not None:
            reduce_leftovers(sharding)


def note_state(module: nn.Module) -> None:
    """Note that a module was sharded by a call of its own, where torch's composable functions look.

    `fully_shard.state` finds its state, and `replicate` around it leaves its parameters alone.
    """
    states, registry = vars(module).get(STATE_KEY, {}), vars(module).get(REGISTRY_KEY, {})
    vars(module)[STATE_KEY] = States({**states, _FULLY_SHARD: UnitState(module)})
    vars(module)[REGISTRY_KEY] = Registry({**registry, "fully_shard": ShardedHere()})


class States(dict[Callable[..., Any], Any]):
    """By function. A copy of the module, or one from a file, gets a state of its own."""

    def __contains__(self, function: object) -> bool:
        """What `fully_shard` of torch asks before it shards: ConfigError."""
        found = super().__contains__(function)
        if found and function is _FULLY_SHARD:
            refuse_fully_shard(self[_FULLY_SHARD].module)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({function: state for function, state in self.items() if function is not _FULLY_SHARD},)


class Registry(dict[str, RegistryItem]):
    """By the name of a function, and otherwise as `States`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: item for name, item in self.items() if name != "fully_shard"},)


_FULLY_SHARD: Callable[..., Any] = fully_shard.__wrapped__  # type: ignore[attr-defined]  # the key of its states
