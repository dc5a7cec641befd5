"""What FSDP2 calls the state of a module, as far as torch's pipelines drive it: what was kept is reduced.

`torch.distributed.fsdp.fully_shard.state(module)` finds it, where torch keeps the states of composable functions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn as nn

from ..runtime.gradients import reduce_leftovers
from ..runtime.wrappers import note_sharded
from .own_units import OwnUnits, own_units_below, own_units_of


@dataclasses.dataclass(unsafe_hash=True)
class UnitState:
    """Of one sharded module, equal to any other of it. Names are torch's.

    Attributes:
        _comm_ctx: what `share_comm_ctx` gives to several models; here their collectives share the streams of the
            process groups, whoever asks.
    """

    module: nn.Module
    _comm_ctx: Any = dataclasses.field(default=None, compare=False)

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
        """After the last backward of a step, in which pipelines have taken back what they said.

        Raises:
            RuntimeError: no backward has left a gradient in any parameter.
        """
        for own in own_units_below(self.module):
            for shard in own.shards:
                shard.stays_full.leave_open()
                shard.stays_kept.leave_open()
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if trained and all(parameter.grad is None for parameter in trained):
            raise RuntimeError(
                f"no backward has computed gradients of {type(self.module).__name__}: a compiled backward cannot be "
                "split into one for inputs and one for weights, as zero bubble schedules do. With "
                "PipelineStage(..., dw_builder=lambda: lambda: None) it is whole where they have the one of inputs"
            )


@dataclasses.dataclass(frozen=True)
class AllStates:
    all_states: list[UnitState]


@dataclasses.dataclass(unsafe_hash=True)
class ParamGroup:
    """The units of one call; `comm_ctx` as that of `UnitState`."""

    own: OwnUnits
    comm_ctx: Any = dataclasses.field(default=None, compare=False)

    def post_backward(self, *_: Any) -> None:
        """Reduce what was kept, if it is not to be kept on."""
        if self.own.shards and (sharding := self.own.shards[0].sharding) is not None:
            reduce_leftovers(sharding)


def note_state(module: nn.Module) -> None:
    """Have `fully_shard.state` find the state of a module that was sharded by a call of its own."""
    note_sharded(module, UnitState(module))
