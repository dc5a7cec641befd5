"""Kernels of a built program as rows: what the compiler says of each, and what it will take by the cost model."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from ..costs.hardware import Hardware
from .build import Program
from .wrapper import steps_of

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Triton kernel, in the first of the configurations that it is tuned over.

    Attributes:
        calls: of the forward and of the backward.
        num_lines: of Triton source.
        registers: of a thread.
        spills: bytes of a thread's stack and local memory, where registers do not suffice.
        shared: bytes of shared memory of a block, static and dynamic.
        num_bytes: read and written by a call, as Inductor counts them.
        seconds: predicted for a call: the start of a kernel, and the time that memory takes for the bytes.
    """

    name: str
    calls: tuple[int, ...]
    num_lines: int
    registers: int
    spills: int
    shared: int
    num_bytes: int
    seconds: float


def kernels_of(program: Program, hardware: Hardware) -> list[Kernel]:
    """A row for each kernel, in the order of their first calls."""
    calls = [Counter(step.name for step in steps_of(half.wrapper) if step.kind == "kernel") for half in program.halves]
    names = dict.fromkeys(name for half in calls for name in half)
    return [_row(name, [half[name] for half in calls], program.kernels, hardware) for name in names]


def _row(name: str, calls: Sequence[int], kernels: Mapping[str, CachingAutotuner], hardware: Hardware) -> Kernel:
    tuned = kernels[name]
    compiled = tuned.compile_results[0].kernel
    registers, stack, static_shared, local = _usage(compiled.asm["cubin"])
    num_bytes = int(1e9 * tuned.inductor_meta["kernel_num_gb"])
    return Kernel(
        name,
        tuple(calls),
        len(tuned.fn.src.splitlines()),
        registers,
        stack + local,
        static_shared + compiled.metadata.shared,
        num_bytes,
        hardware.kernel_start + num_bytes / hardware.memory_bandwidth,
    )


def _usage(cubin: bytes) -> tuple[int, int, int, int]:
    """(registers, stack, shared memory, local memory) of the kernel in a binary, in bytes except for the first."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        found = _USAGE.search(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    assert found is not None, "cuobjdump says nothing of the kernel"
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack, shared, local
