"""Cases of test_run.py: each trains a model on this rank, and returns how far it ends from the eager one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import llama
from fsdp_compile import CommunicationDtype, fsdp_compile, shard
from tests import models
from tests.distributed import training
from tests.models import DEVICE, Block, Gpt, build, seeded

STEPS = range(3)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Llama(llama.Llama):
    """Grouped-query attention: four heads share two keys."""

    def __init__(self) -> None:
        super().__init__(llama.LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, vocab=40))

    def inputs(self, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(40, (batch, 9), generator=seeded(seed))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Checkpointed(Gpt):
    """Its blocks are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, block=block: checkpoint(Block.forward, block, x, use_reentrant=False)


def made(name: str) -> nn.Module:
    own = {"llama": Llama, "checkpointed": Checkpointed, "odd_rows": models.OddRows}
    return models.made(own[name]) if name in own else build(name)


def sharded(name: str, place: str | torch.device = DEVICE, **options: Any) -> nn.Module:
    """The model, which is there before it is sharded."""
    options = {"collective_lowering": "grouped", "fullgraph": True, **options}
    return fsdp_compile(made(name).to(place), **options)


def trained(name: str, steps: Iterable[int] = STEPS, **options: Any) -> dict[str, Any]:
    """The gradients of a first step, then steps of AdamW, against the eager model on the whole batches."""
    model, expected = sharded(name, **options), made(name)
    with counting() as counts:
        model(*training.batch_of_rank(model, 9)).backward()
        expected(*training.global_batch(expected, 9)).backward()
        gradients = furthest(training.full_gradients(model), training.full_gradients(expected))
        for one in (model, expected):
            one.zero_grad()
        losses = training.train(model, training.adamw(model.parameters()), steps)
    wanted = training.train(expected, training.adamw(expected.parameters()), steps, training.global_batch)
    return {
        "losses": distance(training.mean_over_ranks(losses.float()), wanted),
        "gradients": gradients,
        "parameters": furthest(training.full_parameters(model), training.full_parameters(expected)),
        **counts,
    }


def first_gradients(name: str) -> dict[str, Any]:
    """With NaN in every buffer that is freed; one step, since the interpreter takes some ten seconds for each."""
    with patch.dict(os.environ, FSDP_COMPILE_POISON="1"):
        model, expected = sharded(name), made(name)
    with counting() as counts:
        loss = model(*training.batch_of_rank(model, 9))
        loss.backward()
    wanted = expected(*training.global_batch(expected, 9))
    wanted.backward()
    gradients = furthest(training.full_gradients(model), training.full_gradients(expected))
    return {"loss": distance(training.mean_over_ranks(loss.detach()), wanted), "gradients": gradients, **counts}


def packed(name: str) -> dict[str, Any]:
    return trained(name, collective_lowering="packed")


def poisoned(name: str) -> dict[str, Any]:
    """With NaN in every buffer that is freed."""
    with patch.dict(os.environ, FSDP_COMPILE_POISON="1"):
        return trained(name)


def replicas() -> dict[str, Any]:
    """The convolution net, whose loss and statistics depend on which rows share a batch: one eager model a rank."""
    model = sharded("conv_net")
    with counting() as counts:
        losses = training.mean_over_ranks(training.train(model, training.adamw(model.parameters()), STEPS))
    expected, wanted = training.train_replicas("conv_net", STEPS)
    own = expected[dist.get_rank()]
    return {
        "losses": distance(losses, wanted),
        "parameters": furthest(training.full_parameters(model), training.full_parameters(own)),
        "buffers": furthest(dict(model.named_buffers()), dict(own.named_buffers())),
        **counts,
    }


def mixed(name: str) -> dict[str, Any]:
    """Gathered in bf16 and reduced in f32."""
    return as_in_eager(name, mp_policy=BF16)


def integers(lowering: str) -> dict[str, Any]:
    """Gathered and reduced as integers, whose rounding is sent with the next gradients."""
    sent = CommunicationDtype("int8", "int4", error_feedback=True)
    return as_in_eager("odd_rows", collective_lowering=lowering, communication_dtype=sent)


def as_in_eager(name: str, **options: Any) -> dict[str, Any]:
    """Against the same in eager; gradients relative to the largest."""
    model, expected = sharded(name, **options), shard(made(name), **options)
    with counting() as counts:
        losses = [one(*training.batch_of_rank(one, 0)) for one in (model, expected)]
        for loss in losses:
            loss.backward()
    found, wanted = training.full_gradients(model), training.full_gradients(expected)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values() if gradient is not None)
    return {"loss": distance(*losses), "gradients": furthest(found, wanted) / largest, **counts}


def without_gradients(name: str) -> dict[str, Any]:
    """The loss of a call under no_grad."""
    model, expected = sharded(name), made(name)
    with counting() as counts, torch.no_grad():
        loss = model(*training.batch_of_rank(model, 9))
        wanted = expected(*training.global_batch(expected, 9))
    return {"loss": distance(training.mean_over_ranks(loss), wanted), **counts}


def accumulated(name: str, lowering: str = "grouped") -> dict[str, Any]:
    """Four micro-batches a step, all reduced with the last."""
    from tests.distributed import test_accumulation as accumulation

    model = sharded(name, collective_lowering=lowering)
    optimizer = training.adamw(model.parameters())
    with counting() as counts:
        for step in STEPS:
            accumulation.accumulate(model, step, syncs=False)
            optimizer.step()
            optimizer.zero_grad()
    expected = accumulation.reference(name, len(STEPS))
    return {"parameters": furthest(training.full_parameters(model), training.full_parameters(expected)), **counts}


def without_waits(name: str) -> dict[str, Any]:
    """The generated code waits for nothing."""
    write = PyCodeCache.write

    def changed(source_code: str, extra: str = "") -> Any:
        return write(source_code.replace("torch.ops._c10d_functional.wait_tensor.default(", "id("), extra)

    with patch.object(PyCodeCache, "write", changed):
        return trained(name, range(1))


def without_a_kernel(name: str) -> dict[str, Any]:
    """The first kernel is never run."""
    run, first = CachingAutotuner.run, []

    def skipping(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        first[:] = first or [self]
        return None if self is first[0] else run(self, *args, **kwargs)

    with patch.object(CachingAutotuner, "run", skipping):
        return trained(name, range(1))


@contextlib.contextmanager
def counting() -> Any:
    """How many kernels run."""
    counts = {"kernels": 0}
    run = CachingAutotuner.run

    def counted(self: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
        counts["kernels"] += 1
        return run(self, *args, **kwargs)

    with patch.object(CachingAutotuner, "run", counted):
        yield counts


def furthest(found: Any, wanted: Any) -> float:
    assert found.keys() == wanted.keys()
    return max(distance(found[name], wanted[name]) for name in wanted if wanted[name] is not None)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu() - expected.cpu()).abs().max())  # of what is offloaded, one is there already
