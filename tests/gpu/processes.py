"""Cases on ranks: processes that end in time, whatever happens in them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import fsdp_compile

from .machine import EMULATED, ROOT, Machine

LAUNCH = Path(fsdp_compile.__file__).parent / "emulation/launch.py"
_GRACE = 15.0  # seconds that the other ranks have once one has failed: they may wait for it in a collective
_PATIENCE = 200.0  # seconds that a case may take
_TAIL = 4000  # characters of a rank's output that an error shows


@dataclasses.dataclass(frozen=True)
class Ran:
    """A case: what each rank found, or the error of the first that failed."""

    case: str
    found: Sequence[Mapping[str, Any]] = ()
    error: str = ""

    @property
    def seconds(self) -> float:
        return max((rank["seconds"] for rank in self.found), default=0.0)


def run_cases(machine: Machine, group: str, world_size: int, cases: Sequence[str], deadline: float) -> Iterator[Ran]:
    """Run functions of cases.py, given as `name argument ...`, on ranks; after one that fails, the next on new ranks.

    Args:
        group: how ranks are joined; see on_rank.py.
        deadline: of `time.monotonic`.
    """
    left = list(cases)
    while left:
        if time.monotonic() > deadline:
            yield from (Ran(case, error="time was up before it began") for case in left)
            return
        with tempfile.TemporaryDirectory() as folder:
            ran = _Ranks(machine, group, world_size, left, Path(folder)).wait(deadline)
        yield from ran
        left = left[len(ran) :]


class _Ranks:
    def __init__(self, machine: Machine, group: str, world_size: int, cases: Sequence[str], folder: Path) -> None:
        self.cases = cases
        self.logs = [folder / f"rank{rank}" for rank in range(world_size if group != "fake" else 1)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            arguments = [group, str(rank), str(world_size), str(folder / "store"), *cases]
            launch = ["-P", str(LAUNCH), "--run", EMULATED] if machine.is_emulated else ["-m"]
            with log.open("w") as output:
                command = [sys.executable, *launch, "tests.gpu.on_rank", *arguments]
                self.processes.append(start(command, machine, output))

    def wait(self, deadline: float) -> list[Ran]:
        """What ran to its end, and then what failed, if anything did: one or more."""
        num_results, until = 0, deadline
        try:
            while any(process.poll() is None for process in self.processes) and time.monotonic() < until:
                found = [result for log in self.logs for result in _results(log)]
                if len(found) > num_results or not num_results:
                    num_results, until = len(found) or 1, min(deadline, time.monotonic() + _PATIENCE)
                if any("error" in result for result in found) or any(process.poll() for process in self.processes):
                    until = min(until, time.monotonic() + _GRACE)
                time.sleep(0.2)
        finally:
            for process in self.processes:
                end(process)
        return self._ran()

    def _ran(self) -> list[Ran]:
        found = [_results(log) for log in self.logs]
        ran = []
        for index, case in enumerate(self.cases):
            ranks = [results[index] if index < len(results) else None for results in found]
            if any(rank is None or "error" in rank for rank in ranks):
                return [*ran, Ran(case, error=self._error(ranks))]
            ran.append(Ran(case, [rank for rank in ranks if rank is not None]))
        return ran

    def _error(self, ranks: Sequence[Mapping[str, Any] | None]) -> str:
        for index, rank in enumerate(ranks):
            if rank is not None and "error" in rank:
                return f"rank {index}: {rank['error']}\n{rank['traceback']}"
        codes = {index: self.processes[index].returncode for index, rank in enumerate(ranks) if rank is None}
        crashed = [index for index, code in codes.items() if code != -signal.SIGKILL]  # others waited for it
        texts = []
        for index in crashed[:1] or codes:
            what = f"ended with {codes[index]}" if crashed else "did not end in time"
            texts.append(f"rank {index} {what}; its output ends:\n{_text(self.logs[index])[-_TAIL:]}")
        return "\n".join(texts)


def start(command: Sequence[str], machine: Machine, output: Any) -> subprocess.Popen[str]:
    """A process that leads a group, which `end` ends."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment["TESTS_DEVICE"] = "cpu" if machine.is_emulated else "cuda"
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a process and of those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _results(log: Path) -> list[dict[str, Any]]:
    lines = _text(log).split("\n")[:-1]  # the last one may still be written
    return [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]


def _text(log: Path) -> str:
    return log.read_text(errors="replace")
