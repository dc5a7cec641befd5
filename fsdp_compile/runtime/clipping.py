"""Clipping gradients by their norm over all ranks: every rank adds up what it holds, one all-reduce makes it whole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
from torch.distributed.tensor import DTensor

from ..errors import ConfigError
from .holders import Holders
from .views import local_tensor

_WIDE = torch.float64  # what powers of norms are added in: squares of float32 overflow float32


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[torch.Tensor],
    holders: Holders | None,
    own: Collection[torch.Tensor] = (),
    *,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients so that their norm, over all ranks, is at most `max_norm`; the norm from before.

    Args:
        parameters: all parameters of a model, also those without a gradient: whether any of them is sharded decides
            whether ranks communicate, and has to be the same on all of them.
        holders: the ranks that hold the model; None for a single rank.
        own: which of the parameters are others on every rank, and not sharded. Of a single rank, all may be.

    Returns:
        A 0-d tensor on the mesh's device, the same on every rank that holds a part of the same copy of the model;
        float64 if a parameter is, else float32.

    Raises:
        ConfigError: norm_type is not positive.
        RuntimeError: the norm is not finite, and `error_if_nonfinite`; the gradients are unchanged.
    """
    parameters, max_norm, norm_type = list(parameters), float(max_norm), float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"norm_type is a positive number or inf, not {norm_type}")
    norm = _total_norm(parameters, holders, set(own), norm_type)
    has_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    norm = norm.to(torch.float64 if has_double else torch.float32)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; to scale "
            "them by it anyway, set error_if_nonfinite=False"
        )
    coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (on, _), locals_ in _gradients(parameters).items():
        torch._foreach_mul_(locals_, coefficient.to(on))
    return norm


def _device(parameters: list[torch.Tensor], holders: Holders | None) -> torch.device:
    """Where ranks communicate; gradients that were offloaded may be elsewhere."""
    if holders is not None:
        return torch.device(holders.mesh.device_type)
    return parameters[0].device if parameters else torch.device("cpu")


def _total_norm(
    parameters: list[torch.Tensor], holders: Holders | None, own: set[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The norm of all gradients. What several ranks hold whole is added by the first of them, if they add up."""
    device = _device(parameters, holders)
    if holders is None:
        return _norm_on_this_rank(parameters, norm_type, device)
    parts = [holders.part_in(parameter, is_own=parameter in own) for parameter in parameters]
    if not any(part.differs for part in parts):
        return _norm_on_this_rank(parameters, norm_type, device)
    counted = [parameter for parameter, part in zip(parameters, parts, strict=True) if part.adds]
    return _norm_of_norms(_norm_on_this_rank(counted, norm_type, device), norm_type, holders)


def _norm_on_this_rank(parameters: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    norms = [torch.zeros(1, dtype=_WIDE, device=device)]  # a rank may hold no gradient
    for (_, dtype), locals_ in _gradients(parameters).items():
        # Norms of half-precision gradients are float32; `_foreach_norm` is private as of torch 2.11 to 2.15.
        computed = torch._foreach_norm(locals_, norm_type, dtype=torch.promote_types(dtype, torch.float32))
        norms.append(torch.stack(computed).to(device, _WIDE))
    norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    return norm


def _norm_of_norms(norm: torch.Tensor, norm_type: float, holders: Holders) -> torch.Tensor:
    """The norm over all ranks, from that of every rank: one all-reduce."""
    what = "the norm of the gradients (clip_grad_norm_)"
    if not math.isinf(norm_type):
        power: torch.Tensor = holders.all_reduce(what, norm**norm_type, "sum") ** (1 / norm_type)
        return power
    # A maximum may or may not keep a nan, so it travels as a flag.
    both = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf), norm.isnan().to(_WIDE)])
    largest, has_nan = holders.all_reduce(what, both, "max").unbind()
    return torch.where(has_nan > 0, math.nan, largest)


def _gradients(parameters: list[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """This rank's parts by device and dtype, without empty ones, whose largest element does not exist."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_tensor(parameter.grad) if isinstance(parameter.grad, DTensor) else parameter.grad
            if local.numel():
                groups.setdefault((local.device, local.dtype), []).append(local)
    return groups
