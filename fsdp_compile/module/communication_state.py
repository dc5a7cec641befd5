"""The state of communication: what messages have lost of gradients, saved with a checkpoint for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from ..runtime.collectives import reduce_packed, running_alone
from ..runtime.flat_shard import FlatShard
from ..runtime.views import laid_out_as, local_tensor, shard_rank, views_at
from .sharding import is_sharded, sharding_of


class CommunicationState:
    """What `CommunicationDtype(error_feedback=True)` keeps of gradients from one step to the next.

    It is a Stateful of torch.distributed.checkpoint::

        dcp.save({"model": model.state_dict(), "communication": CommunicationState(model)}, checkpoint_id="checkpoint")

    What is saved is what all messages together have lost of the gradient of each parameter: float32, sharded as the
    parameter, on any number of ranks. Which rank's messages had lost it is not saved, so that a training that goes on
    from a checkpoint is equal to one that never ended but for rounding.

    Raises:
        ConfigError: no unit of the model has error_feedback.
    """

    def __init__(self, model: nn.Module) -> None:
        self._prefix_of = {
            shard: f"{name}." if name else ""
            for name, module in model.named_modules()
            if is_sharded(module)
            for shard in sharding_of(module).shards
            if shard.layout.feeds_back
        }
        if not self._prefix_of:
            raise ConfigError(
                "there is no state of communication: no unit has error_feedback in its communication_dtype"
            )

    @torch.no_grad()
    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was lost of gradients that are not reduced yet, by parameter. All ranks call it."""
        found = {}
        for shard in self._prefix_of:
            flat = _reduced(shard)
            for (name, parameter), lost in zip(self._parameters(shard), views_at(flat, shard.places), strict=True):
                found[name] = laid_out_as(parameter, lost)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, also from other numbers of ranks.

        Raises:
            ConfigError: a parameter is missing, or not sharded as it is here; nothing was taken over.
        """
        for shard in self._prefix_of:
            for name, parameter in self._parameters(shard):
                _check(name, parameter, state_dict)
        for shard in self._prefix_of:
            flat = torch.zeros(shard.layout.numel, dtype=torch.float32, device=shard.known_residual().device)
            for (name, _), view in zip(self._parameters(shard), views_at(flat, shard.places), strict=True):
                view.copy_(local_tensor(state_dict[name]))
            _take_over(shard, flat)

    def _parameters(self, shard: FlatShard) -> Iterator[tuple[str, nn.Parameter]]:
        for slot, parameter in zip(shard.layout.slots, shard.parameters, strict=True):
            yield self._prefix_of[shard] + slot.parameter, parameter


def _check(name: str, parameter: torch.Tensor, state_dict: Mapping[str, Any]) -> None:
    if (found := state_dict.get(name)) is None:
        raise ConfigError(f"the state of communication has nothing for {name}")
    assert isinstance(parameter, DTensor)
    wanted = parameter.shape, parameter.placements
    if not isinstance(found, DTensor) or (found.shape, found.placements) != wanted:
        raise ConfigError(f"the state of communication has {name} as {type(found).__name__}, not as {wanted}")


def _reduced(shard: FlatShard) -> torch.Tensor:
    """What is lost of the gradient of a shard: reduced as gradients are, but in float32."""
    layout, residual = shard.layout, shard.known_residual()
    axes = layout.shards.size, layout.shards.group, torch.float32, residual.device
    replicas = layout.replicas.size, layout.replicas.group
    with running_alone(f"the state of communication of {layout.bucket}", shard.agreement, *layout.groups):
        return reduce_packed(residual.float(), *axes, *replicas, layout.reduction.operator, layout.reduction.divisor)


def _take_over(shard: FlatShard, lost: torch.Tensor) -> None:
    """Let this rank's messages have lost its part of a gradient, times what the reduction will divide it by."""
    layout, residual = shard.layout, shard.known_residual()
    is_mean = layout.reduction.operator == "avg"
    times = layout.reduction.divisor * (layout.shards.size if is_mean else 1 / layout.replicas.size)
    by_rank = residual.data.zero_().view(layout.shards.size, -1)
    by_rank[shard_rank(layout, shard.mesh)] = lost * times
