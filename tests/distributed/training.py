"""How the distributed tests train: the same batches with and without sharding, and what is compared."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tests.models import build

ROWS = 4  # of the batch, per rank: compute kernels have the same shapes on any world size
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def global_batch(model: nn.Module, step: int) -> tuple[Tensor, ...]:
    return model.inputs(ROWS * dist.get_world_size(), seed=step)


def batch_of_rank(model: nn.Module, step: int, rank: int | None = None) -> tuple[Tensor, ...]:
    rank = dist.get_rank() if rank is None else rank
    return tuple(tensor[rank * ROWS : (rank + 1) * ROWS] for tensor in global_batch(model, step))


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    # A larger rate would show rounding: AdamW's steps have the size of the rate, however small the gradient.
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # unlike AdamW's, its steps show the scale of the gradients


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[int],
    batch: Callable[[nn.Module, int], tuple[Tensor, ...]] = batch_of_rank,
) -> Tensor:
    """The loss of every step."""
    losses = []
    for step in steps:
        loss = model(*batch(model, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_unsharded(name: str, steps: Iterable[int]) -> tuple[nn.Module, Tensor]:
    """The eager model, trained on whole batches."""
    model = build(name)
    return model, train(model, adamw(model.parameters()), steps, batch=global_batch)


def train_replicas(name: str, steps: Iterable[int]) -> tuple[list[nn.Module], Tensor]:
    """One eager model per rank, each on that rank's part of the batch, gradients averaged before each step.

    It is the exact reference for a model whose loss depends on which rows share a batch. All of it is
    computed here, without a collective.
    """
    model = build(name)
    replicas = [copy.deepcopy(model) for _ in range(dist.get_world_size())]
    optimizers = [adamw(replica.parameters()) for replica in replicas]
    losses = []
    for step in steps:
        rank_losses = [replica(*batch_of_rank(replica, step, rank)) for rank, replica in enumerate(replicas)]
        losses.append(torch.stack(rank_losses).mean().detach())
        torch.stack(rank_losses).sum().backward()
        average_gradients(replicas)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return replicas, torch.stack(losses)


def average_gradients(replicas: list[nn.Module]) -> None:
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
        for parameter in parameters:
            parameter.grad = mean.clone()


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(parameter.detach()) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    return {name: None if gradient is None else full(gradient) for name, gradient in gradients}


def assert_close(actual: object, expected: object) -> None:
    torch.testing.assert_close(actual, expected, **CLOSE)


def assert_same_parameters(model: nn.Module, expected: nn.Module) -> None:
    """Names, order and values; every rank calls it, because a full tensor is gathered."""
    assert_same_tensors(full_parameters(model), full_parameters(expected))


def assert_same_gradients(model: nn.Module, expected: nn.Module) -> None:
    """The same parameters have one, and it is the same; every rank calls it."""
    assert_same_tensors(full_gradients(model), full_gradients(expected))


def assert_same_tensors(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert list(actual) == list(expected), f"{list(actual)} != {list(expected)}"
    assert names_of_none(actual) == names_of_none(expected)
    for name, tensor in expected.items():
        if tensor is not None:
            torch.testing.assert_close(actual[name], tensor, **CLOSE, msg=functools.partial(_named, name))


def names_of_none(tensors: dict[str, Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is None]


def _named(name: str, message: str) -> str:
    return f"{name}: {message}"
