"""What the benchmarks share: subjects in processes of their own that take turns, medians and tables.

The processes of a subject (a `Team`) stay alive, and blocked, while others run: a request is a line of JSON on their
stdin, a reply one on their stdout. Rounds go through the subjects forwards and backwards in turn, so that all of them
meet every state of the machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from allocation import LIBRARY
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RANK = Path(__file__).with_name("rank.py")
Reply = dict[str, Any]
CONSOLE = Console(width=int(os.environ.get("COLUMNS", 180)))

# ----------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------


def serve(answer: Callable[[Reply], Reply]) -> None:
    """Answer requests until there are no more. What is printed meanwhile goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as e:
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {e}\n{traceback.format_exc()}"}
        print(json.dumps(reply), file=replies, flush=True)


class Failed(Exception):
    """A process of a team failed, or ended, or took too long."""


class Team:
    """The processes of one subject, one for each rank."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path) -> None:
        """Start a process for each (command, environment); their stderr is appended to `log`."""
        self.log = log
        with log.open("a") as stderr:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=environment,
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
                for command, environment in commands
            ]

    def ask(self, request: Reply, seconds: float = 900) -> list[Reply]:
        """The replies of the ranks; raises Failed, with no process left, if one has none."""
        try:
            for process in self.processes:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
            return self._replies(seconds)
        except BaseException as e:
            for process in self.processes:
                process.kill()
            self.stop()
            if isinstance(e, (BrokenPipeError, TimeoutError)):
                raise Failed(f"{type(e).__name__}; its messages are in {self.log}") from None
            raise

    def _replies(self, seconds: float) -> list[Reply]:
        with ThreadPoolExecutor(len(self.processes)) as pool:
            lines = {pool.submit(process.stdout.readline): rank for rank, process in enumerate(self.processes)}
            reply_of_rank = {}
            try:
                for line in as_completed(lines, timeout=seconds):
                    reply = json.loads(line.result() or '{"error": "the process ended"}')
                    if "error" in reply:
                        raise Failed(reply["error"])
                    reply_of_rank[lines[line]] = reply
            except BaseException:
                for process in self.processes:  # the pool waits for those that still read
                    process.kill()
                raise
        return [reply_of_rank[rank] for rank in range(len(self.processes))]

    def stop(self) -> None:
        for process in self.processes:
            with suppress(BrokenPipeError):  # a process that is gone leaves behind what it was to read
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclasses.dataclass
class Teams:
    """Those that run, and why others do not, by subject."""

    running: dict[str, Team] = dataclasses.field(default_factory=dict)
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    def start(self, name: str, team: Team, request: Reply) -> list[Reply] | None:
        """The first replies of a new team, which takes the place of one of the same name; None if it failed."""
        if name in self.running:
            self.running.pop(name).stop()
        self.failures.pop(name, None)
        self.running[name] = team
        replies = self.ask(name, request)
        if replies is not None:
            CONSOLE.print(f"{name}: the first step took {replies[0]['first']:.1f} s", style="dim", highlight=False)
        return replies

    def ask(self, name: str, request: Reply) -> list[Reply] | None:
        try:
            return self.running[name].ask(request)
        except Failed as e:
            del self.running[name]
            self.failures[name] = str(e)
            CONSOLE.print(f"[red]{name} failed[/red]: {str(e)[:500]}", highlight=False)
            return None

    def take_turns(self, rounds: int, request: Reply) -> dict[str, list[list[Reply]]]:
        """The replies to a request that every team gets once a round: of each round, of each rank."""
        replies: dict[str, list[list[Reply]]] = {name: [] for name in self.running}
        for number in range(rounds):
            for name in list(self.running)[:: -1 if number % 2 else 1]:
                if (found := self.ask(name, request)) is not None:
                    replies[name].append(found)
        return {name: replies[name] for name in self.running}

    def stop(self) -> None:
        for team in self.running.values():
            team.stop()
        self.running.clear()


def one_rank(name: str, folder: Path, world_size: int, device: str = "cpu") -> Team:
    """A rank of a job that is not there, with nothing compiled before."""
    place = re.sub(r"\W+", "-", name)  # the C++ compiler is called with paths that are not quoted
    command = [sys.executable, str(RANK), "--library", str(folder / LIBRARY)]
    command += ["--world-size", str(world_size), "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / place)}
    return Team([(command, environment)], folder / f"{place}.log")


def on_this_machine(command: Sequence[str], ranks: int, log: Path, **environment: str) -> Team:
    """A job of this many ranks, each of which runs the command; on a port that is free, as of torchrun."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
    size = str(ranks)
    of_all = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    places = [of_all | {"RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(ranks))]
    return Team([(command, {**shared, **place}) for place in places], log)


# ----------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------


FORWARD, BACKWARD, OPTIMIZER = range(3)


def seconds_of(replies: Sequence[Sequence[Reply]], *parts: int) -> list[float]:
    """Of every step of all rounds, the seconds of these parts, on the slowest rank."""
    return [
        max(sum(rank[part] for part in parts) for rank in step)
        for ranks in replies
        for step in zip(*(reply["steps"] for reply in ranks), strict=True)
    ]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the deciles at both ends."""
    deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


def milliseconds(found: Mapping[str, float], name: str) -> dict[str, str]:
    """The cells of a spread of seconds, below `name`, "p10" and "p90"."""
    short = name.removesuffix(" ms")
    headings = {"median": name, "p10": f"{short} p10", "p90": f"{short} p90"}
    digits = 2 if found["median"] < 0.1 else 1
    return {heading: f"{1e3 * found[key]:.{digits}f}" for key, heading in headings.items()}


def show(title: str, rows: Sequence[Mapping[str, str]], failures: Mapping[str, str]) -> None:
    """Print a table with a column for each key of the rows, and below what is missing in it."""
    table = Table(title=title, title_justify="left")
    for heading in dict.fromkeys(heading for row in rows for heading in row):
        table.add_column(heading, justify="right" if table.columns else "left")
    for row in rows:
        table.add_row(*(row.get(str(column.header), "") for column in table.columns))
    CONSOLE.print(table)
    for name, reason in failures.items():
        CONSOLE.print(f"{name}: {reason[:300]}", highlight=False, markup=False)
