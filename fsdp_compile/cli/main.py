"""The command line: `fsdp-compile plan`, `build`, `emulate`, `report`, `calibrate` and `doctor`; their arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from .build import add_build, add_emulate
from .names import HARDWARE, OPTIMIZERS

_INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)


def _run(options: argparse.Namespace) -> None:
    """The command. What takes seconds to import is imported from here on: the manuals do without."""
    from ..errors import CaptureError, ConfigError

    try:
        options.run(options)
    except (ConfigError, CaptureError, OSError) as e:
        if options.debug:
            raise
        sys.exit(f"error: {e}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-compile",
        description="Plan, look at and check training with fsdp_compile. COMMAND --help is the manual of a command.",
    )
    parser.add_argument("--debug", action="store_true", help="errors with their tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    add_build(commands)
    add_emulate(commands)
    _add_report(commands)
    _add_calibrate(commands)
    doctor = commands.add_parser(
        "doctor",
        help="say what is installed, and train a small model on 2 ranks of this machine",
        description="Prints versions, devices and compilers, then trains a small model on 2 ranks of this machine, "
        "with every backend that can run, and compares it with the unsharded one. Exits with 1 if something is wrong.",
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="predict time and memory of a training step, without the hardware",
        description="Trace a model on the meta device, rewrite its training step for every combination of the options, "
        "and predict what a step takes of a rank. Options with a + take several values.",
        epilog="example: fsdp-compile plan examples/llama.py:llama3_8b --gpus 8 64 --seq 8192 --html plan.html",
    )
    plan.add_argument(
        "model",
        metavar="FILE:FUNCTION",
        help="a function without arguments that returns the model; FILE is run as by import, not as __main__",
    )
    plan.add_argument(
        "--inputs",
        default="inputs",
        metavar="FUNCTION",
        help="of the same file: (batch, seq) to the arguments of the model (default: inputs)",
    )
    plan.add_argument("--gpus", type=int, nargs="+", default=[8], metavar="N", help="+ ranks (default: 8)")
    plan.add_argument(
        "--mesh",
        nargs="+",
        default=[],
        metavar="SIZES",
        help="+ dp=32,tp=8 in place of --gpus: ranks with rows of their own, and neighbours that split the model; auto "
        "is every such mesh of --gpus within nodes, with --stages also pipelines. dp=32,ep=8: of 32 ranks, 8 "
        "neighbours split experts. dp=8,pp=4: a pipeline of 4 stages of 8 ranks; pp=4x2: each has 2 of 8 stages, "
        "interleaved. The best come first",
    )
    plan.add_argument(
        "--parallelize",
        metavar="FUNCTION",
        help="of the same file: (model, mesh) splits the model over mesh['tp'] and mesh['ep'] (default: parallelize)",
    )
    plan.add_argument(
        "--stages",
        metavar="FUNCTION",
        help="of the same file: (model, number) cuts the model into so many modules, each of which takes what the one "
        "before returns (default: stages)",
    )
    plan.add_argument("--micro-batch", type=int, metavar="N", help="rows that pass a pipeline at once (default: 1)")
    rows = plan.add_mutually_exclusive_group()
    rows.add_argument("--batch", type=int, nargs="+", default=[1], metavar="N", help="+ rows of a rank (default: 1)")
    rows.add_argument("--global-batch", type=int, metavar="N", help="rows of all ranks in a step")
    plan.add_argument("--seq", type=int, default=2048, metavar="N", help="tokens of a row (default: 2048)")
    plan.add_argument(
        "--strategy",
        nargs="+",
        default=["FULL_SHARD"],
        choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "auto"],
        help="+ hybrid shards over the ranks of a node; auto is planned, and is the fastest that fits "
        "(default: FULL_SHARD)",
    )
    plan.add_argument("--lowering", default="grouped", choices=["grouped", "packed"], help="(default: grouped)")
    plan.add_argument(
        "--collective-pieces",
        type=int,
        default=1,
        help="into how many pieces the collectives of tensor parallelism are decomposed (default: 1)",
    )
    plan.add_argument("--optimizer", default="adam", choices=OPTIMIZERS, help="(default: adam)")
    plan.add_argument(
        "--hardware",
        default="h100",
        metavar="NAME",
        help=f"{', '.join(HARDWARE)}, or a profile of `calibrate` (default: h100)",
    )
    plan.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="keep only the inputs of layers, the modules of a list that are equal, and compute them again",
    )
    plan.add_argument(
        "--trace-all",
        action="store_true",
        help="trace every layer: otherwise six stand for twelve or more whose modules are equal",
    )
    plan.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--html", metavar="FILE", help="write the schedules as a page for a browser, too")
    plan.set_defaults(run=_plan)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="show a schedule that was saved",
        description="Shows a schedule that model.explain(schedule=FILE) saved: in words, as a page for a browser, or "
        "as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.",
    )
    report.add_argument(
        "schedule", nargs="+", metavar="FILE", help="one or more of them, of which a trace lays one over the other"
    )
    report.add_argument("--html", metavar="FILE", help="the page to write")
    report.add_argument("--trace", metavar="FILE", help="the trace to write")
    report.set_defaults(run=_report)


def _add_calibrate(commands: Any) -> None:
    measure = commands.add_parser(
        "calibrate",
        help="measure the machine, or under torchrun the cluster, into a profile for `plan`",
        description="Measures matmuls, memory, and under torchrun messages of several sizes; takes a few seconds.",
        epilog="example: torchrun --nproc-per-node 8 -m fsdp_compile calibrate --out cluster.json",
    )
    measure.add_argument("--out", default="hardware.json", metavar="FILE", help="(default: hardware.json)")
    measure.add_argument("--device", choices=["cpu", "cuda"], help="(default: cuda where there is one)")
    measure.set_defaults(run=_calibrate)


def _plan(options: argparse.Namespace) -> None:
    from .plan import plan

    plan(options)


def _report(options: argparse.Namespace) -> None:
    from .commands import report

    report(options)


def _calibrate(options: argparse.Namespace) -> None:
    from .commands import measure

    measure(options)


def _doctor(options: argparse.Namespace) -> None:
    from .commands import diagnose

    diagnose(options)
