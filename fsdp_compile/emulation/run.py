"""Run: the program of a GPU, executed on the CPU's memory.

After `install`, a model on the CPU that is compiled by `fsdp_compile` is traced, rewritten and compiled as if its
tensors were on a GPU. The code that Inductor generates for CUDA then runs on the real tensors, which are the CPU's: its
buffers are CPU memory, its kernels run in Triton's interpreter, its matmuls are the CPU's own, and its collectives take
place when they are waited for (collectives.py). Shards, hooks, gradients and optimizers are the real ones.

This shows numbers, buffers, views, frees and order. It does not show streams and their races, NCCL, or time. Random
numbers are not a GPU's: Inductor draws the seeds of dropout from the CPU's generator.

Private, as of torch 2.13 to 2.15 and Triton 3.9: what is replaced below, each with who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.utils import _GRAPHSAFE_RNG_DEVICE_TYPES
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

from ..compiler import capture
from ..passes import analysis
from . import attention, collectives, libdevice

_CUDA = torch.device("cuda", 0)


def install() -> None:
    """From here on, what this process compiles are programs of the emulated GPU, which run.

    The process was started by `launch.py --run`.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (capture, "compile_fx", _compile_for_cuda),
        (torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided),
        (torch.cuda, "set_device", lambda device: None),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    _GRAPHSAFE_RNG_DEVICE_TYPES.add("cpu")
    libdevice.install()
    attention.install()
    collectives.install()


def _compile_for_cuda(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """As `compile_fx`, for inputs on the GPU; what it returns takes those on the CPU."""
    fake_mode = detect_fake_mode(example_inputs)
    assert fake_mode is not None, "Dynamo traces with fake tensors"
    for graph in analysis.graphs_of(gm):
        _move_constants(graph)
    return compile_fx(gm, [_on_cuda(value, fake_mode) for value in example_inputs], **kwargs)


def _move_constants(graph: torch.fx.Graph) -> None:
    """What the graph makes on the CPU, it makes on the GPU."""
    for node in graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, _moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _moved)


def _moved(argument: Any) -> Any:
    is_cpu = isinstance(argument, torch.device | str) and str(argument) == "cpu"
    return _CUDA if is_cpu else argument


def _on_cuda(value: Any, fake_mode: FakeTensorMode) -> Any:
    """A fake tensor on the GPU, like `value`; anything that is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CUDA)
    return fake.requires_grad_(value.requires_grad)


def _empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A buffer of the generated code, on the CPU. That it is read before it is written shows in the results."""
    return collectives.unknown_(torch.empty_strided(size, stride, dtype=dtype))
