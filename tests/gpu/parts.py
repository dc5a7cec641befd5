"""The parts of the suite: each yields what became of what it tried, and raises only what it did not expect."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .machine import ROOT, Machine
from .processes import Ran, end, run_cases, start
from .report import FAILED, NOT_RUN, PASSED, Outcome


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the suite runs on and how much of it; `deadline` is of `time.monotonic`."""

    machine: Machine
    deadline: float
    is_smallest: bool = False


# ----------------------------------------------------------------------------------------------------------
# Parity
# ----------------------------------------------------------------------------------------------------------

CASES = {
    "trained odd_mlp": "an MLP whose rows no world size divides, three steps, grouped collectives",
    "packed odd_mlp": "the same, packed collectives",
    "trained gpt": "a transformer, three steps",
    "replicas": "convolutions and BatchNorm, three steps",
    "mixed gpt": "gathered in bfloat16, reduced in float32: the gradients of a step",
    "accumulated odd_mlp": "four micro-batches a step, reduced once",
    "offloaded odd_mlp": "shards in the CPU's memory",
    "moved gpt": "a transformer in the CPU's memory before it is sharded",
    "trained adapted": "LoRA: frozen bfloat16 and trainable float32 parameters",
    "poisoned odd_mlp": "buffers filled with NaN when they are freed",
    "graphed gpt": "CUDA graphs, with their collectives",
}
_DISTANCES = ("loss", "losses", "gradients", "parameters", "buffers")
_CLOSE, _CLOSE_EMULATED = 1e-4, 1e-5  # on a GPU, matmuls of other shapes sum in another order
# bfloat16 has 8 bits, and compiled code rounds more seldom: of a loss of 4, and of the largest gradient.
_CLOSE_MIXED = {"loss": 0.1, "gradients": 0.04}


def parity(setting: Setting) -> Iterator[Outcome]:
    """Ranks train as the eager model does, by losses, gradients and parameters."""
    machine = setting.machine
    part, (group, world_size) = f"parity on {machine.ranks[1]} ranks over {machine.ranks[0]}", machine.ranks
    cases = ["trained odd_mlp"] if setting.is_smallest else list(CASES)
    if "graphed gpt" in cases and group != "nccl":
        cases.remove("graphed gpt")
        why = "collectives of gloo cannot be a part of a CUDA graph"
        yield Outcome(part, "graphed gpt", NOT_RUN, f"{CASES['graphed gpt']}: {why}")
    for ran in run_cases(machine, group, world_size, cases, setting.deadline):
        stand_in = machine.stand_in
        if machine.is_emulated and ran.case.startswith("offloaded"):
            stand_in += "; an emulated GPU's memory is the CPU's, so what is offloaded moves nowhere"
        outcome = compared(part, ran, _CLOSE_MIXED if ran.case.startswith("mixed") else _close(machine))
        found = f"{CASES[ran.case]}: {outcome.found}"
        yield dataclasses.replace(outcome, found=found, stand_in=stand_in, is_emulated=machine.is_emulated)


def _close(machine: Machine) -> Mapping[str, float]:
    return dict.fromkeys(_DISTANCES, _CLOSE_EMULATED if machine.is_emulated else _CLOSE)


def compared(part: str, ran: Ran, close: Mapping[str, float]) -> Outcome:
    """Passed, if no rank is further from what was expected than this; NaN is."""
    if ran.error:
        return Outcome(part, ran.case, FAILED, _first_line(ran.error), error=ran.error)
    names = [name for name in _DISTANCES if name in ran.found[0]]
    furthest = {name: _furthest([rank[name] for rank in ran.found]) for name in names}
    is_close = bool(names) and all(furthest[name] <= close[name] for name in names)
    signs = {name: "<=" if furthest[name] <= close[name] else "exceeds" for name in names}
    texts = [f"{name} {furthest[name]:.1e} {signs[name]} {close[name]:.0e}" for name in names]
    found = ", ".join(texts) or "nothing was compared"
    figures = {"distances": furthest, "within": close, "ranks": ran.found}
    return Outcome(part, ran.case, PASSED if is_close else FAILED, found, figures, ran.seconds)


def _furthest(distances: Sequence[float]) -> float:
    return max(distances, key=lambda distance: (distance != distance, distance))  # NaN is not less than anything


# ----------------------------------------------------------------------------------------------------------
# Predictions
# ----------------------------------------------------------------------------------------------------------

FAKE_RANKS = 8
_CLOSE_MEMORY = 0.1  # of the peak
_MIB = 2**20


def predictions(setting: Setting) -> Iterator[Outcome]:
    """Time and memory of a step, predicted and measured; only the memory decides whether it passes."""
    machine = setting.machine
    group, world_size = ("nccl", machine.ranks[1]) if machine.has_nccl else ("fake", FAKE_RANKS)
    part = f"predictions, {'one rank of ' if group == 'fake' else ''}{world_size} ranks"
    case = "predicted tiny" if machine.is_emulated else "predicted large"
    for ran in run_cases(machine, group, world_size, [case], setting.deadline):
        if ran.error:
            yield Outcome(part, case, FAILED, _first_line(ran.error), error=ran.error)
            continue
        for outcome in _against_measured(part, ran):
            yield _not_measured(outcome) if machine.is_emulated else outcome


def _not_measured(outcome: Outcome) -> Outcome:
    """The code has run, with the prediction in place of what is measured: it says nothing."""
    found, stand_in = outcome.found.partition(", measured")[0], "what is predicted, in place of what is measured"
    status = NOT_RUN if outcome.status == PASSED else FAILED
    found = f"{found}; nothing was measured"
    return dataclasses.replace(outcome, status=status, found=found, stand_in=stand_in, is_emulated=True)


def _against_measured(part: str, ran: Ran) -> Iterator[Outcome]:
    rank = max(ran.found, key=lambda rank: rank["measured_bytes"])
    predicted, measured = rank["predicted_bytes"], rank["measured_bytes"]
    off = measured / predicted - 1
    found = f"predicted {predicted / _MIB:,.1f} MiB, measured {measured / _MIB:,.1f} ({off:+.1%})"
    status = PASSED if abs(off) <= _CLOSE_MEMORY else FAILED
    yield Outcome(part, "peak memory", status, found, {"ranks": ran.found, "within": _CLOSE_MEMORY}, ran.seconds)
    slowest = max(rank["measured_seconds"] or 0.0 for rank in ran.found)
    if rank["predicted_seconds"] is None:
        found = f"measured {1e3 * slowest:.2f} ms; nothing is predicted for a GPU that is not described"
        yield Outcome(part, "time of a step", NOT_RUN, found, {"measured_seconds": slowest})
        return
    off = slowest / rank["predicted_seconds"] - 1
    found = f"predicted {1e3 * rank['predicted_seconds']:.2f} ms for {rank['hardware']}, measured {1e3 * slowest:.2f}"
    figures = {"predicted_seconds": rank["predicted_seconds"], "measured_seconds": slowest}
    yield Outcome(part, "time of a step", PASSED, f"{found} ({off:+.1%})", figures)


# ----------------------------------------------------------------------------------------------------------
# One rank of many
# ----------------------------------------------------------------------------------------------------------

BENCHMARK = ROOT / "benchmarks/one_gpu.py"
_SUBJECTS = ["single-compiled", "fsdp2", "fsdp2-compiled", "fsdp_compile-grouped"]
_SIZES = ["--layers", "4", "--rounds", "3", "--steps", "5"]
_DRY = ["--dry-run", "--rounds", "1", "--steps", "1"]


def one_rank(setting: Setting) -> Iterator[Outcome]:
    """benchmarks/one_gpu.py: a rank of 8 and of 64 beside plain compiled and FSDP2, with CUDA graphs and without."""
    is_emulated = setting.machine.is_emulated
    stand_in = "benchmarks/one_gpu.py --dry-run: a tiny Llama on the CPU, whose times and bytes mean nothing"
    for world_size in (8,) if setting.is_smallest else (8, 64):
        begin = time.monotonic()
        subjects = ["fsdp2"] if setting.is_smallest else _SUBJECTS
        arguments = ["--world-sizes", str(world_size), "--subjects", *subjects, *(_DRY if is_emulated else _SIZES)]
        rows, said = _benchmark(setting, arguments)
        seconds = (time.monotonic() - begin) / max(len(rows), 1)
        part = f"one rank of {world_size}"
        if not rows:
            yield Outcome(part, BENCHMARK.name, FAILED, _first_line(said), error=said, seconds=seconds)
        for row in rows:
            outcome = dataclasses.replace(_row(part, row, rows), seconds=seconds)
            if is_emulated:
                found = f"it runs; on the CPU {outcome.found}" if outcome.status == PASSED else outcome.found
                outcome = dataclasses.replace(outcome, found=found, stand_in=stand_in, is_emulated=True)
            yield outcome


def _benchmark(setting: Setting, arguments: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """The rows that the benchmark writes, and the end of what it says; no rows if it fails or time is up."""
    seconds = setting.deadline - time.monotonic()
    if seconds <= 0:
        return [], "time was up before it began"
    with tempfile.TemporaryDirectory() as folder:
        log, results = Path(folder) / "log", Path(folder) / "results.json"
        with log.open("w") as output:
            command = [sys.executable, str(BENCHMARK), *arguments, "--json", str(results)]
            process = start(command, setting.machine, output)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return [], f"did not end in time; its output ends:\n{log.read_text()[-4000:]}"
        finally:
            end(process)
        if not results.exists():
            return [], f"ended with {process.returncode}; its output ends:\n{log.read_text()[-4000:]}"
        return json.loads(results.read_text()), log.read_text()


def _row(part: str, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Outcome:
    name = row["subject"]
    if "error" in row:
        is_of_eager = row["error"].startswith("CUDA graphs are torch.compile's")
        status, error = (NOT_RUN, "") if is_of_eager else (FAILED, row["error"])
        return Outcome(part, name, status, row["error"].partition("\n")[0], error=error)
    baseline = next((each for each in rows if each["subject"] == _SUBJECTS[0] and "step" in each), None)
    seconds = row["step"]["median"]
    texts = [f"{1e3 * seconds:.2f} ms a step"]
    texts += [f"{seconds / baseline['step']['median']:.3f} of {_SUBJECTS[0]}"] if baseline else []
    texts += [f"{row['kernels']} kernels"] if row["kernels"] else []
    texts += [f"peak {row['peak'] / _MIB:,.1f} MiB"]
    texts += [f"predicted {row['predicted'] / _MIB:,.1f}"] if row["predicted"] else []
    return Outcome(part, name, PASSED, ", ".join(texts), row)


# ----------------------------------------------------------------------------------------------------------
# CUDA graphs
# ----------------------------------------------------------------------------------------------------------


def cuda_graphs(setting: Setting) -> Iterator[Outcome]:
    """Training with CUDA graphs has the losses and the shards that it has without."""
    machine = setting.machine
    group, world_size = ("nccl", 1) if machine.ranks[0] == "gloo" and not machine.is_emulated else machine.ranks
    part, model = f"CUDA graphs on {world_size} ranks over {group}", "odd_mlp" if machine.is_emulated else "gpt"
    kinds = ("2 within",) if setting.is_smallest else ("1", "2", "1 within", "2 within")
    cases = [f"replayed {model} {kind}" for kind in kinds]
    for ran in run_cases(machine, group, world_size, cases, setting.deadline):
        outcome = compared(part, ran, _close(machine))
        if outcome.status == PASSED and not ran.found[0]["graphs"]:
            outcome = dataclasses.replace(outcome, status=FAILED, found="Inductor made no CUDA graph")
        elif not ran.error:
            counts = f"{ran.found[0]['graphs']} graphs, {ran.found[0]['skips']} that Inductor left out"
            outcome = dataclasses.replace(outcome, found=f"{outcome.found}; {counts}")
        emulated = "graphs are not recorded: programs run, and their results end as a graph's do"
        stand_in = emulated if machine.is_emulated else ""
        yield dataclasses.replace(outcome, stand_in=stand_in, is_emulated=machine.is_emulated)


def _first_line(text: str) -> str:
    return text.partition("\n")[0][:300]


PARTS: Mapping[str, Callable[[Setting], Iterator[Outcome]]] = {
    "parity": parity,
    "predictions": predictions,
    "cuda-graphs": cuda_graphs,
    "one-rank": one_rank,
}
