"""Parameters that are full between steps: what `unshard` of a module gathers, until `reshard`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch.nn as nn

from ..errors import ConfigError
from ..runtime.flat_shard import FlatShard
from ..runtime.gathering import Gathering


class Unsharded:
    """Full parameters of one shard, in the places of the sharded ones once the gather is done.

    They have the dtype that the forward computes with, as FSDP2's have.
    """

    def __init__(self, shard: FlatShard, model: nn.Module) -> None:
        """Start the gather; `model` holds places of the shard's parameters. Every rank calls this."""
        layout = shard.layout
        flat = shard.data.detach().to(layout.param_dtype or shard.data.dtype)
        self._shard = shard
        self._gathering: Gathering | None = Gathering(shard, flat, f"unshard of {layout.bucket}")
        self._model = model
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter, int]] = []

    def wait(self) -> None:
        """Put the full parameters in their places, once: wherever modules hold the sharded ones."""
        if self._gathering is None:
            return
        gathering, self._gathering = self._gathering, None
        full_of_parameter = {
            parameter: nn.Parameter(full.detach(), parameter.requires_grad)
            for parameter, full in zip(self._shard.parameters, gathering.wait(), strict=True)
        }
        for module in dict.fromkeys([*self._model.modules(), *(owner for owner, _ in self._shard.owners)]):
            for name, parameter in module._parameters.items():
                if parameter is not None and (full := full_of_parameter.get(parameter)) is not None:
                    self._places.append((module, name, parameter, full, full._version))
                    module._parameters[name] = full

    def end(self) -> None:
        """Bring the sharded parameters back.

        Raises:
            RuntimeError: a backward through the full parameters left gradients, which no rank would reduce.
        """
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.wait()
        lost = []
        for module, name, parameter, full, version in self._places:
            if module._parameters.get(name) is full:
                module._parameters[name] = parameter
            if full._version != version:
                lost.append(name)
        graded = [name for _, name, _, full, _ in self._places if full.grad is not None]
        self._places = []
        bucket = self._shard.layout.bucket
        if lost:
            warnings.warn(
                f"{bucket}: what was written to {', '.join(lost)} between unshard and reshard is lost; write inside "
                "summon_full_params",
                stacklevel=2,
            )
        if graded:
            raise RuntimeError(
                f"{bucket}: {', '.join(graded)} got gradients between unshard and reshard, outside of a call of the "
                "model, and no rank reduces them: compute inside the model's forward, or in a method registered by "
                "register_fsdp_forward_method"
            )


def unshard(model: nn.Module, shards: Iterable[FlatShard]) -> list[Unsharded]:
    """Start gathers of the shards that are not unsharded yet; `model` holds them.


    `FlatShard.reshard` ends it.

    Raises:
        ConfigError: a shard is on the meta device.
    """
    found = []
    shards = list(shards)
    for shard in shards:
        if shard.data.is_meta:
            raise ConfigError(
                f"{shard.layout.slots[0].parameter} has no values on the meta device: call model.to_empty first"
            )
    for shard in shards:
        if not isinstance(unsharded := shard.unsharded, Unsharded):
            shard.unsharded = unsharded = Unsharded(shard, model)
        found.append(unsharded)
    return found
