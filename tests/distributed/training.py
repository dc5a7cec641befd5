"""How the distributed tests train: the same batches with and without sharding, and what is compared."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_compile import ConfigError, fsdp_compile, shard
from fsdp_compile.backend import backend_for
from fsdp_compile.compiler.options import CompileConfig
from fsdp_compile.graphs import RewrittenGraph
from fsdp_compile.module.sharding import sharding_of
from fsdp_compile.passes import ops
from tests.models import DEVICE, build, placed

compiled = functools.partial(fsdp_compile, backend="aot_eager")


def backend_of(model: nn.Module) -> Any:
    """What torch.compile's backend "fsdp" is for a sharded model, without Inductor."""
    return backend_for(sharding_of(model), CompileConfig("aot_eager"))


def torch_compiled(model: nn.Module) -> Any:
    """What torch.compile(shard(model), backend="fsdp") does, without Inductor."""
    return torch.compile(shard(model), backend=backend_of(model))


both_front_ends = pytest.mark.parametrize("front_end", [compiled, shard], ids=["compiled", "eager"])

STEPS = range(4)
ROWS = 4  # of the batch, per rank: compute kernels have the same shapes on any world size
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def global_batch(model: nn.Module, step: int) -> tuple[Tensor, ...]:
    with placed():
        return model.inputs(ROWS * dist.get_world_size(), seed=step)


def batch_of_rank(model: nn.Module, step: int, rank: int | None = None) -> tuple[Tensor, ...]:
    rank = dist.get_rank() if rank is None else rank
    return tuple(tensor[rank * ROWS : (rank + 1) * ROWS] for tensor in global_batch(model, step))


def first_rows(model: nn.Module, step: int) -> tuple[Tensor, ...]:
    """The same rows on every rank."""
    return batch_of_rank(model, step, rank=0)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    # A larger rate would show rounding: AdamW's steps have the size of the rate, however small the gradient.
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # unlike AdamW's, its steps show the scale of the gradients


class Collectives:
    """Counts those that run, in graphs and outside of them, by the beginnings of their names; several at once are one.

    Where a graph is traced, some run as well.
    """

    def __init__(self, *names: str) -> None:
        self.begin = tuple(f"_c10d_functional::{name}" for name in names)

    def __enter__(self) -> Collectives:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)
        self.num = sum(event.name.startswith(self.begin) for event in self.profiler.events())


class NoDTensors(TorchDispatchMode):
    """In which no operator gets a DTensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(issubclass(found, DTensor) for found in types), func
        return func(*args, **(kwargs or {}))


def take_step(optimizers: Iterable[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def hybrid_mesh() -> DeviceMesh:
    """Of four ranks: two copies, each of them sharded over two ranks."""
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replicate", "shard"))


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
        take_step([optimizer])
        losses.append(loss.detach().clone())  # a CUDA graph writes the next one to the same memory
    return torch.stack(losses)


def backward_of_both(model: nn.Module, expected: nn.Module, step: int = 0) -> None:
    """The gradients of a sharded model from the batch of this rank, of the unsharded one from all of it."""
    expected(*global_batch(expected, step)).backward()
    model(*batch_of_rank(model, step)).backward()


def assert_trains_as(
    model: nn.Module,
    expected: nn.Module,
    steps: Iterable[int] = STEPS,
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = adamw,
    *,
    shares_rows: bool = False,
) -> None:
    """A sharded model has the losses and parameters of the unsharded one, and its buffers where all rows are shared.

    Args:
        model: may be what torch.compile has made of it.
        shares_rows: whether every rank, and the unsharded model, sees the first rank's part of each batch.
    """
    batch, expected_batch = (first_rows, first_rows) if shares_rows else (batch_of_rank, global_batch)
    expected_losses = train(expected, make_optimizer(expected.parameters()), steps, batch=expected_batch)
    losses = train(model, make_optimizer(model.parameters()), steps, batch=batch)
    assert_close(losses if shares_rows else mean_over_ranks(losses), expected_losses)
    model = getattr(model, "_orig_mod", model)
    assert_same_parameters(model, expected)
    if shares_rows:
        assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))


def assert_same_step(
    model: nn.Module, expected: nn.Module, loss: Tensor, losses: list[Tensor], optimizers: Iterable[Optimizer]
) -> None:
    """One step of a sharded model, which has this loss here, and of the unsharded one, with the losses of all ranks."""
    assert_close(loss, losses[dist.get_rank()])
    if loss.requires_grad:
        loss.backward()
        torch.stack(losses).mean().backward()
    assert_same_gradients(model, expected)
    take_step(optimizers)


def halving(call: Callable[[int], Tensor], num_rows: int) -> tuple[Tensor, int]:
    """What `call` returns for as many rows, or half as many, and so on until they fit; and their number."""
    while True:
        try:
            return call(num_rows), num_rows
        except ConfigError:
            if num_rows == 1:
                raise
            num_rows //= 2


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
        take_step(optimizers)
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


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
    dcp.save(state_of(model, optimizer), checkpoint_id=path, **options)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path, **options)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def gathered_units(side: RewrittenGraph) -> list[str]:
    """Of a forward or a backward: the units whose buckets it gathers, in order."""
    gathers = [node for node in side.graph.nodes if ops.is_all_gather(node)]
    return [ops.unit_of_bucket(ops.argument(node, "bucket")) for node in gathers]


def gathered_dtypes(side: RewrittenGraph) -> set[torch.dtype]:
    """Of a forward or a backward: the dtypes of the shards that it gathers."""
    return {node.all_input_nodes[0].meta["val"].dtype for node in side.graph.nodes if ops.is_all_gather(node)}


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
