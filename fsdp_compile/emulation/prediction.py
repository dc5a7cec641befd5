"""Predictions from a built program: its own kernels and their bytes, where `costs.predict` estimates what is fused.

Triton kernels take the time of their bytes, as kernels.py has it. Collectives, and the calls of libraries that compute
(matmuls, convolutions, attention), take what the cost model says of their nodes in the schedule. Other calls of
libraries, copies most of them, take the time of the bytes that they read and write.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch.fx

from ..costs.collectives import Ring
from ..costs.hardware import Hardware
from ..costs.nodes import Kernel
from ..costs.predict import Prediction, predict
from ..costs.timeline import COMPUTE, Step, rings_of, run, start_step
from ..costs.work import WorkOfGraph
from ..passes import analysis, ops
from . import wrapper
from .build import Half, Program
from .checks import MATMULS
from .kernels import Kernel as TritonKernel


@dataclasses.dataclass(frozen=True)
class BuiltPrediction:
    """What a step of a program takes, beside the estimate from its graphs alone.

    Attributes:
        built: as `costs.predict`, but its timeline runs the program's own kernels.
        estimate: of `costs.predict`.
        built_bytes: read and written by Triton kernels and copies, in forward and backward.
        estimated_bytes: the same by the estimate: everything but what libraries compute.
    """

    built: Prediction
    estimate: Prediction
    built_bytes: int
    estimated_bytes: int


def predict_built(
    program: Program, kernels: list[TritonKernel], hardware: Hardware, *, optimizer: str = "adam"
) -> BuiltPrediction:
    """What a step of the program takes on this hardware.

    Args:
        kernels: of the program, by `kernels_of`.

    Raises:
        ConfigError: there is no such optimizer.
    """
    estimate = predict(program.graphs, hardware, optimizer=optimizer)
    rings = rings_of(estimate.work, hardware)
    bytes_of_kernel = {kernel.name: kernel.num_bytes for kernel in kernels}
    sides = [
        _Side(half, side, bytes_of_kernel, rings, hardware)
        for half, side in zip(program.halves, estimate.work.sides, strict=True)
    ]
    steps = [step for side in sides for step in side.steps()]
    return BuiltPrediction(
        dataclasses.replace(estimate, timeline=run(steps, hardware)),
        estimate,
        sum(side.num_bytes for side in sides),
        sum(side.estimated_bytes for side in sides),
    )


class _Side:
    """Forward or backward: the calls of the wrapper, with the nodes of the schedule that say what they take.

    Attributes:
        num_bytes: of Triton kernels and copies, as far as `steps` has come.
        estimated_bytes: of the schedule's kernels, except for those of libraries.
    """

    def __init__(
        self,
        half: Half,
        side: WorkOfGraph,
        bytes_of_kernel: Mapping[str, int],
        rings: Mapping[str, Ring],
        hardware: Hardware,
    ) -> None:
        self.half, self.bytes_of_kernel, self.rings, self.hardware = half, bytes_of_kernel, rings, hardware
        self.sent = [node for node in side.graph.nodes if ops.is_collective(node) or ops.is_call(node, ops.COPY_START)]
        self.of_library: dict[str, list[Kernel]] = defaultdict(list)
        self.estimated_bytes = self.num_bytes = 0
        for kernel in side.kernels:
            name = _name(_operator(kernel.nodes[0]))
            if analysis.is_heavy(kernel.nodes[0]) and _is_of_library(name):
                self.of_library[name].append(kernel)
            else:
                self.estimated_bytes += int(kernel.num_bytes)
        self.node = next(iter(side.graph.nodes))

    def steps(self) -> Iterator[Step]:
        """What compute comes to, each step at the node of the schedule that was reached."""
        starts = iter(self.sent)
        start_of: dict[str, torch.fx.Node] = {}
        for call in wrapper.steps_of(self.half.wrapper):
            if call.kind in ("collective", "copy"):
                self.node = next(starts)
                start_of |= dict.fromkeys([call.result] if call.result else call.reads, self.node)
                yield start_step(self.node, self.rings, self.hardware)
            elif call.kind == "alias" and call.reads[0] in start_of:
                start_of[call.result] = start_of[call.reads[0]]
            elif call.kind == "wait":
                (self.node,) = start_of[call.reads[0]].users
                yield Step(COMPUTE, self.node, 0.0)
            elif call.kind == "kernel":
                yield self._moving(self.bytes_of_kernel[call.name])
            elif call.kind == "extern" and (known := self.of_library[_name(call.name)]):
                kernel = known.pop(0)
                self.node = kernel.nodes[-1]
                yield Step(COMPUTE, self.node, kernel.seconds(self.hardware))
            elif call.kind == "extern":
                yield self._moving(self._bytes_of(call))

    def _moving(self, num_bytes: int) -> Step:
        self.num_bytes += num_bytes
        return Step(COMPUTE, self.node, self.hardware.kernel_start + num_bytes / self.hardware.memory_bandwidth)

    def _bytes_of(self, call: wrapper.Step) -> int:
        """Twice what a copy writes; what is given to a call that writes to it."""
        written, *read = (wrapper.num_bytes(name, self.half.bytes_of_buffer) for name in (call.result, *call.reads))
        return 2 * written or sum(read)


def _name(operator: str) -> str:
    return MATMULS.get(operator, operator)


def _is_of_library(name: str) -> bool:
    """Whether a library computes this; Triton kernels do what else is heavy (embeddings, scatters)."""
    return name in MATMULS or any(part in name for part in ("convolution", "attention", "rng_state"))


def _operator(node: torch.fx.Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else getattr(target, "__name__", "")
