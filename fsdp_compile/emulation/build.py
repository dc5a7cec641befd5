"""Build: the program that a GPU would run for a training step, as Inductor generates and Triton compiles it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import sympy
import torch
import torch._functorch.config
from torch import nn
from torch._C._distributed_c10d import HashStore, ProcessGroup, _register_process_group, _unregister_process_group
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import Layout
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch.distributed.distributed_c10d import GroupName

from ..graphs import RewrittenGraphs
from ..options import Options
from ..rewriting import rewrite_for


@dataclasses.dataclass(frozen=True)
class Half:
    """The forward or the backward.

    Attributes:
        wrapper: the generated Python, which calls kernels and libraries.
        bytes_of_buffer: what each of its buffers and inputs takes, by the name that the wrapper has for it; 0 where its
            size varies.
    """

    wrapper: str
    bytes_of_buffer: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a rank would run.

    Attributes:
        graphs: the rewritten graphs.
        halves: the forward and, where gradients are asked for, the backward.
        kernels: the compiled Triton kernels by name, each with a candidate for every configuration it is tuned over.
    """

    graphs: RewrittenGraphs
    halves: Sequence[Half]
    kernels: Mapping[str, CachingAutotuner]


_SETTINGS: dict[str, Any] = {
    "profile_bandwidth": True,  # kernels say how many bytes they move
    "triton.unique_kernel_names": True,
    "use_static_cuda_launcher": False,  # which forgets how a kernel was compiled
}


def build(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, world_size: int | tuple[int, int]
) -> Program:
    """The program of a rank for `model(*args, **kwargs)`; model and inputs are on the meta device.

    Raises:
        ConfigError: as `rewrite`.
        CaptureError: the call cannot be traced as one graph.
    """
    halves: list[Half] = []
    kernels: dict[str, CachingAutotuner] = {}
    groups: dict[GroupName, ProcessGroup] = {}  # the registry does not keep them
    with _noting(halves, kernels):
        graphs = rewrite_for(
            model, args, kwargs, options, world_size, "cuda", lambda found: groups.update(_groups_of(found))
        )
    return Program(graphs, halves, kernels)


@contextmanager
def _noting(halves: list[Half], kernels: dict[str, CachingAutotuner]) -> Iterator[None]:
    precompile = CachingAutotuner.precompile

    def note_half(wrapper: str) -> None:
        functions = [subgraph.graph for subgraph in V.graph.seen_subgraphs.values() if subgraph.graph]
        buffers = {
            name: buffer
            for graph in (V.graph, *functions)
            for name, buffer in {**graph.name_to_buffer, **graph.graph_inputs}.items()
        }
        halves.append(Half(wrapper, {name: _num_bytes(buffer) for name, buffer in buffers.items()}))

    def noted(self: CachingAutotuner, *args: Any, **kwargs: Any) -> None:
        precompile(self, *args, **kwargs)
        kernels[self.inductor_meta["kernel_name"]] = self

    with (
        patch.object(GraphLowering, "save_output_code", note_half),
        patch.object(CachingAutotuner, "precompile", noted),
        config.patch(_SETTINGS),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
    ):
        yield


def _num_bytes(buffer: Any) -> int:
    """Of a buffer of Inductor's on the GPU with numbers for sizes; 0 for what is no tensor."""
    if isinstance(buffer, sympy.Basic):  # a size that varies is an input, too
        return 0
    try:
        layout = buffer.get_layout()
    except NotImplementedError:
        return 0
    if not isinstance(layout, Layout) or layout.device.type == "cpu":
        return 0
    if not all(isinstance(size, (int, sympy.Integer)) for size in layout.size):
        return 0
    return int(layout.storage_size()) * layout.dtype.itemsize


def _groups_of(graphs: RewrittenGraphs) -> dict[GroupName, ProcessGroup]:
    """The process groups of the collectives, registered by name, since Inductor looks them up; they move nothing."""
    groups: dict[GroupName, ProcessGroup] = {}
    for lowered in filter(None, (graphs.lowered.forward, graphs.lowered.backward)):
        for node in lowered.graph.nodes:
            if getattr(node.target, "namespace", "") == "_c10d_functional" and isinstance(name := node.args[-1], str):
                size = node.args[-2] if isinstance(node.args[-2], int) else 1  # an all-reduce does not say it
                groups[GroupName(name)] = ProcessGroup(HashStore(), 0, size)
    for name, group in groups.items():
        _unregister_process_group(name)
        _register_process_group(name, group)
    return groups
