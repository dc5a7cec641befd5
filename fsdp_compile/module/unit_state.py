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
from .own_units import OwnUnits, own_units_below, own_units_of


@dataclasses.dataclass(frozen=True)
class UnitState:
    """Of one sharded module. Names are torch's."""

    module: nn.Module

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        own = own_units_of(self.module)
        return [] if own is None else [ParamGroup(own)]

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return next(iter(self._fsdp_param_groups), None)

    @property
    def _state_ctx(self) -> AllStates:
        return AllStates([UnitState(own.modules[0]) for own in own_units_below(self.module)])

    def _root_post_backward_final_callback(self) -> None:
        """Nothing is left to wait for."""


@dataclasses.dataclass(frozen=True)
class AllStates:
    all_states: list[UnitState]


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """The units of one call."""

    own: OwnUnits

    def post_backward(self, *_: Any) -> None:
        """Reduce what was kept, if it is not to be kept on.

        Raises:
            RuntimeError: no backward has left a gradient in any parameter of the model.
        """
        sharding = self.own.shards[0].sharding if self.own.shards else None
        if sharding is not None:
            reduce_leftovers(sharding)
        parts = self.own.modules if sharding is None else [module for own in sharding.owns for module in own.modules]
        trained = [each for part in parts for each in part.parameters() if each.requires_grad]
        if trained and all(each.grad is None for each in trained):
            raise RuntimeError(
                f"no backward has computed gradients of {type(parts[-1]).__name__}: a compiled backward cannot be split "
                "into one for inputs and one for weights, as zero bubble schedules do; 1F1B and interleaved ones train it"
            )


def note_state(module: nn.Module) -> None:
    """Note that a module was sharded by a call of its own, as torch's composable functions do.

    `fully_shard.state` finds its state; `replicate` leaves its parameters alone.
    """
    for key, by, noted in ((STATE_KEY, _FULLY_SHARD, UnitState(module)), (REGISTRY_KEY, "fully_shard", RegistryItem())):
        vars(module)[key] = Noted({**vars(module).get(key, {}), by: noted})


class Noted(dict[Any, Any]):
    """What composable functions have noted of a module. A copy, or one from a file, is to be noted as sharded anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({by: noted for by, noted in self.items() if by not in (_FULLY_SHARD, "fully_shard")},)


_FULLY_SHARD: Callable[..., Any] = fully_shard.__wrapped__  # type: ignore[attr-defined]  # the key of its states
