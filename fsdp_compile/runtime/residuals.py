"""Residuals: what messages of integers have lost of gradients, kept to be sent with the next."""

from __future__ import annotations

import torch
import torch.nn as nn

from ..layout.buckets import Layout
from ..passes import forms, ops


def no_residual(layout: Layout, shard: torch.Tensor) -> nn.Parameter:
    """That of a bucket of which nothing was sent: zeros, laid out as `fsdp::pack` does, on the device of gradients."""
    size, device = layout.shards.size * layout.numel, layout.compute_device or shard.device
    return nn.Parameter(torch.zeros(size, dtype=forms.RESIDUAL, device=device), requires_grad=False)


def _keep(remainder: torch.Tensor, residual: torch.Tensor, bucket: str) -> None:
    residual.data.copy_(remainder)  # of the same step another backward may hold the residual: it reads the new value


ops.LIBRARY.impl("keep", _keep, "CompositeExplicitAutograd")
