"""Cases of the suite on ranks, beside those of emulation: each returns distances from what is expected, and figures."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.multiprocessing.reductions import StorageWeakRef

import llama
from fsdp_compile import fsdp_compile
from fsdp_compile.costs import Prediction
from fsdp_compile.emulation.collectives import unknown_
from tests.distributed import training
from tests.emulation.cases import (
    BF16,
    accumulated,
    distance,
    first_gradients,
    furthest,
    mixed,
    packed,
    poisoned,
    replicas,
    sharded,
    trained,
)
from tests.models import DEVICE

__all__ = ["accumulated", "first_gradients", "mixed", "packed", "poisoned", "replicas", "trained"]

IS_EMULATED = DEVICE.type == "cpu"
GRAPHS = {"triton.cudagraphs": True}
REPLAYS = range(5)  # CUDA graphs warm up in the first step, and are recorded in the second


def offloaded(name: str) -> dict[str, Any]:
    """Shards, gradients and the optimizer's states in the CPU's memory."""
    return trained(name, offload_policy=CPUOffloadPolicy(pin_memory=not IS_EMULATED))


def moved(name: str) -> dict[str, Any]:
    """A model in the CPU's memory, sharded over a mesh of GPUs."""
    return trained(name, place="cpu", mesh=init_device_mesh(DEVICE.type, (dist.get_world_size(),)))


def graphed(name: str) -> dict[str, Any]:
    """With CUDA graphs, collectives and all."""
    with recording() as counts:
        return {**trained(name, options=GRAPHS), **counts}


def replayed(name: str, micro_batches: str, steps: str = "after") -> dict[str, Any]:
    """With CUDA graphs and without: the same losses and parameters, to the last bit but for atomics.

    Args:
        steps: whether the optimizer steps "after" the backward or "within" it.
    """
    found = []
    with recording() as counts:
        for options in ({}, GRAPHS):
            torch._dynamo.reset()
            model = sharded(name, options=options)
            found.append((_losses(model, int(micro_batches), steps == "within"), model))
    (losses, model), (with_graphs, other) = found
    shards = [
        {key: parameter.detach().to_local() for key, parameter in each.named_parameters()} for each in (model, other)
    ]
    return {"losses": distance(with_graphs, losses), "parameters": furthest(*shards), **counts}


def _losses(model: Any, micro_batches: int, steps_within: bool) -> Tensor:
    """Of steps that each reduce what several micro-batches add up to."""
    optimizer, losses = training.adamw(model.parameters()), []
    if steps_within:
        model.optimizer_in_backward(optimizer)
    for step in REPLAYS:
        for index in range(micro_batches):
            is_last = index == micro_batches - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = model(*training.batch_of_rank(model, step * micro_batches + index))
                loss.backward()
            losses.append(loss.detach().clone())  # the next replay writes to the same memory
        if not steps_within:
            training.take_step([optimizer])
    return torch.stack(losses)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, int]]:
    """How many graphs are to be CUDA graphs, and how often Inductor does without.

    Emulation records none: the programs run as they are.
    """
    counts, pool = {"graphs": 0, "skips": 0}, Pool()
    by_torch, before = torch._inductor.compile_fx.cudagraphify, counters["inductor"]["cudagraph_skips"]

    def counted(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        counts["graphs"] += 1
        if IS_EMULATED:
            return pool.graph(model, kwargs["is_backward"])
        return by_torch(model, *args, **kwargs)

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(torch._inductor.compile_fx, "cudagraphify", counted))
        if IS_EMULATED:
            has_allocator = patch.object(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True, create=True)
            patches.enter_context(has_allocator)
        yield counts
    counts["skips"] = counters["inductor"]["cudagraph_skips"] - before


class Pool:
    """The memory of emulated CUDA graphs: results of a call are there until a forward begins, and then are NaN."""

    def __init__(self) -> None:
        # Nothing else is held: autograd takes a gradient as it is if nobody else has it.
        self.results: list[tuple[StorageWeakRef, torch.dtype]] = []

    def graph(self, run: Callable[..., Any], is_backward: bool) -> Callable[..., Any]:
        def call(inputs: list[Any]) -> Any:
            if not is_backward:
                self.end_lives()
            held = {tensor.untyped_storage()._cdata for tensor in inputs if isinstance(tensor, Tensor)}
            found = run(inputs)
            for result in found:
                if isinstance(result, Tensor) and result.untyped_storage()._cdata not in held:
                    self.results.append((StorageWeakRef(result.untyped_storage()), result.dtype))
            return found

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def end_lives(self) -> None:
        for reference, dtype in self.results:
            if (storage := torch.UntypedStorage._new_with_weak_ptr(reference.cdata)) is not None:
                unknown_(torch.empty(0, dtype=dtype).set_(storage))
        self.results.clear()


# ----------------------------------------------------------------------------------------------------------
# Predictions
# ----------------------------------------------------------------------------------------------------------

CONFIGS = {
    "tiny": (llama.LlamaConfig(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, vocab=40), 1, 8),
    "large": (llama.LlamaConfig(layers=4, dim=2048, heads=32, kv_heads=8, ffn_dim=8192, vocab=32768), 2, 2048),
}
"""(config, rows of a rank, tokens of a row): 378 million parameters for a GPU, and what an interpreter can run."""

WARM_UP, MEASURED = 3, 10


def predicted(size: str) -> dict[str, Any]:
    """Time and peak memory of a step of a Llama with mixed precision: predicted, and measured.

    With the fake group what is sent takes no time, and the prediction is of the rest.
    """
    config, rows, tokens = CONFIGS[size]
    torch.manual_seed(0)
    with torch.device(DEVICE):
        built = llama.Llama(config)
        text = torch.randint(config.vocab, (rows, tokens + 1))
    inputs = (text[:, :-1].contiguous(), text[:, 1:].contiguous())
    model = fsdp_compile(built, mp_policy=BF16, collective_lowering="grouped", fullgraph=True, sync_module_states=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(*inputs).backward()
        training.take_step([optimizer])

    step()
    explanation = model.explain()
    memory = explanation.outlines[-1].memory.peak.total
    prediction = explanation.predictions[-1] if explanation.predictions else None
    seconds = None if prediction is None else _seconds(prediction)
    measured = (seconds, memory) if IS_EMULATED else _measured(step)
    return {
        "predicted_seconds": seconds,
        "predicted_bytes": memory,
        "measured_seconds": measured[0],
        "measured_bytes": measured[1],
        "hardware": prediction.hardware.name if prediction else None,
        "parameters_of_model": sum(parameter.numel() for parameter in model.parameters()),
    }


def _seconds(prediction: Prediction) -> float:
    is_alone = dist.get_backend() == "fake"
    return prediction.timeline.compute + prediction.optimizer_seconds if is_alone else prediction.seconds


def _measured(step: Callable[[], None]) -> tuple[float, int]:
    """Median seconds of a step by CUDA events, and the most bytes that torch's allocator held."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(MEASURED + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in zip(marks, marks[1:], strict=False)]
    return statistics.median(seconds), torch.cuda.max_memory_allocated()
