"""What `fsdp-compile build` runs, in a process with an emulated GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy

from ..cli.build import add_build
from ..cli.models import load, made_on_meta
from ..costs.hardware import Hardware, find_hardware
from ..costs.predict import bytes_text, time_text
from ..errors import CaptureError, ConfigError
from ..options import Options
from .build import Half, Program, build
from .checks import check
from .kernels import Kernel, kernels_of
from .memory import bytes_at_steps, peak_bytes
from .prediction import BuiltPrediction, predict_built
from .wrapper import steps_of

_MIB = 2**20
_WIDTH = 130


def main() -> None:
    parser = argparse.ArgumentParser(prog="fsdp-compile")
    add_build(parser.add_subparsers())
    options = parser.parse_args()
    try:
        _build(options)
    except (ConfigError, CaptureError, OSError) as e:
        sys.exit(f"error: {e}")


def _build(options: argparse.Namespace) -> None:
    model, inputs, _ = made_on_meta(load(options.model, options.inputs), options.batch, options)
    hardware = find_hardware(options.hardware)
    begun = time.perf_counter()
    program = build(model, tuple(inputs), {}, options_of(options), options.gpus)
    seconds = time.perf_counter() - begun
    torch._dynamo.reset()
    unsharded = build(model, tuple(inputs), {}, options_of(options), 1)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    kernels = kernels_of(program, hardware)
    _write(out, program, kernels)
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(_table(kernels, hardware))
    console.print(_against(program, unsharded))
    print(_predicted(predict_built(program, kernels, hardware)))
    problems = check(program)
    print("\n".join(problems) or "every check holds: order, buffers in flight, frees, no wait for the device")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"compiled in {seconds:.0f} s; peak resident memory {peak:.0f} MiB; written to {out}/")


def options_of(options: argparse.Namespace) -> Options:
    """What the flags of `fsdp-compile build` ask of a sharded model."""
    param, reduce = (
        None if name is None else getattr(torch, name) for name in (options.param_dtype, options.reduce_dtype)
    )
    return Options(
        sharding_strategy=ShardingStrategy[options.strategy],
        collective_lowering=options.lowering,
        mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce) if param or reduce else None,
        offload_policy=CPUOffloadPolicy() if options.offload else None,
    )


def _write(out: Path, program: Program, kernels: list[Kernel]) -> None:
    (out / "schedule.txt").write_text(program.graphs.schedule() + "\n")
    (out / "kernels.json").write_text(json.dumps([dataclasses.asdict(kernel) for kernel in kernels], indent=2) + "\n")
    for name, half in zip(("forward", "backward"), program.halves, strict=False):
        (out / f"{name}.py").write_text(half.wrapper)
        lines = [
            f"{total / _MIB:10.2f}  {step.kind:<10} {step.result:<12} {step.name} {', '.join(step.reads)}".rstrip()
            for step, total in bytes_at_steps(half.wrapper, half.bytes_of_buffer)
        ]
        (out / f"{name}.steps.txt").write_text("MiB after each step\n" + "\n".join(lines) + "\n")


def _table(kernels: list[Kernel], hardware: Hardware) -> Table:
    table = Table(
        title=f"Triton kernels for {hardware.name}; a call's bytes as Inductor counts them, its time predicted"
    )
    for heading in ("kernel", "forward", "backward", "lines", "registers", "spills", "shared", "MiB", "us"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for kernel in kernels:
        forward, backward = (*kernel.calls, 0)[:2]
        figures = (forward, backward, kernel.num_lines, kernel.registers, kernel.spills, kernel.shared)
        megabytes, microseconds = f"{kernel.num_bytes / _MIB:.3f}", f"{kernel.seconds * 1e6:.1f}"
        table.add_row(kernel.name, *map(str, figures), megabytes, microseconds)
    return table


def _against(program: Program, unsharded: Program) -> Table:
    """What differs from the program of the unsharded model, as plain torch.compile would have it."""
    table = Table(title="calls, beside those of the unsharded model")
    for heading in ("", "kernels", "libraries", "copies", "collectives", "waits", "peak MiB"):
        table.add_column(heading, justify="right" if heading else "left")
    for title, each in (("sharded", program), ("unsharded", unsharded)):
        for side, half in zip(("forward", "backward"), each.halves, strict=False):
            table.add_row(f"{title} {side}", *_counts(half.wrapper), f"{_peak(half):.1f}")
    return table


def _predicted(prediction: BuiltPrediction) -> str:
    built, estimate = (time_text(each.seconds) for each in (prediction.built, prediction.estimate))
    moved, estimated = (bytes_text(each) for each in (prediction.built_bytes, prediction.estimated_bytes))
    return (
        f"a step with Adam: {built} predicted from these kernels, {estimate} from the graphs alone; "
        f"beside matmuls and attention, {moved} read and written, {estimated} by the estimate"
    )


def _counts(wrapper: str) -> list[str]:
    steps = steps_of(wrapper)
    kinds = Counter(step.kind for step in steps)
    copies = sum(step.kind == "extern" and step.name in COPIES for step in steps)
    return [str(number) for number in (kinds["kernel"], kinds["extern"], copies, kinds["collective"], kinds["wait"])]


COPIES = {"cat", "clone", "copy_", "slice_copy"}
"""Operators of ATen that only copy, which generated code calls for us."""


def _peak(half: Half) -> float:
    return peak_bytes(half.wrapper, half.bytes_of_buffer) / _MIB


if __name__ == "__main__":
    main()
