"""Cases of test_run.py: each trains a model on this rank, and returns how far it ends from the eager one."""

from __future__ import annotations

import torch

from fsdp_compile import fsdp_compile
from tests.distributed.training import adamw, full_parameters, mean_over_ranks, train, train_unsharded
from tests.models import build

STEPS = range(3)


def trained(name: str, lowering: str = "grouped") -> dict[str, float]:
    """Three steps of AdamW."""
    model = fsdp_compile(build(name), collective_lowering=lowering)
    losses = mean_over_ranks(train(model, adamw(model.parameters()), STEPS))
    expected, expected_losses = train_unsharded(name, STEPS)
    return {"losses": distance(losses, expected_losses), "parameters": furthest(model, expected)}


def furthest(model: torch.nn.Module, expected: torch.nn.Module) -> float:
    found, wanted = full_parameters(model), full_parameters(expected)
    return max(distance(found[name], wanted[name]) for name in wanted)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()
