"""The guard: gradients that are not finite are found at the end of the backward that made them, by all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import NonFiniteError
from ..layout.distribution import local_part
from ..passes import ops
from .flat_shard import Shards
from .views import local_tensor

_SHOWN = 8  # parameters that an error names
_NAN = 2  # of the kinds of values, for the maximum over ranks


def check_after_backward(sharding: Shards) -> None:
    """Have autograd check the gradients of a sharding, which asks for that, at the end of the running backward."""
    if sharding.checks_gradients and not sharding.is_checking:
        sharding.is_checking = True

        def check() -> None:
            sharding.is_checking = False
            sharding.num_backwards += 1
            _check(sharding)

        torch.autograd.Variable._execution_engine.queue_callback(check)


@torch.no_grad()
def _check(sharding: Shards) -> None:
    """Raise NonFiniteError, on every rank, if a gradient of any rank is not finite."""
    named = list(_gradients(sharding))
    if not named:
        return
    device = torch.device("cpu")
    holders = sharding.holders
    if holders is not None and holders.mesh.device_type != "cpu":
        device = torch.device(holders.mesh.device_type, torch.accelerator.current_device_index())
    found = torch.stack([_kind(gradient).to(device) for _, _, gradient in named])
    if holders is not None:  # replicas have the same gradients
        found = holders.all_reduce("the comparison of check_gradients", found, "max")
    bad = [(*each[:2], kind) for each, kind in zip(named, found.tolist(), strict=True) if kind]
    if not bad:
        return
    shown = [f"{name} (unit {unit}): {'NaN' if kind == _NAN else 'infinite'}" for name, unit, kind in bad[:_SHOWN]]
    more = [f"and {len(bad) - _SHOWN} more"] if len(bad) > _SHOWN else []
    raise NonFiniteError(
        f"gradients are not finite at the end of backward number {sharding.num_backwards} since the model was sharded, "
        f"in {len(bad)} of {len(named)} parameters:\n  " + "\n  ".join([*shown, *more])
    )


def _kind(gradient: torch.Tensor | None) -> torch.Tensor:
    """0 for finite values or none, 1 for infinite ones, 2 if there is a NaN."""
    if gradient is None:
        return torch.zeros((), dtype=torch.int32)
    return torch.where(gradient.isnan().any(), _NAN, gradient.isinf().any().to(torch.int32)).to(torch.int32)


def _gradients(sharding: Shards) -> Iterator[tuple[str, str, torch.Tensor | None]]:
    """Name, unit, and this rank's part of the gradient, of every parameter, in the same order on every rank."""
    for shard in sharding.shards:
        unit = ops.unit_of_bucket(shard.layout.bucket)
        for slot, parameter in zip(shard.layout.slots, shard.parameters, strict=True):
            yield slot.parameter, unit, None if parameter.grad is None else local_tensor(parameter.grad)
    for name, (unit, parameter) in sharding.whole.items():
        yield name, unit, None if parameter.grad is None else local_part(parameter.grad)
