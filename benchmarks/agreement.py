"""What ranks ask of the store of the process group, and how long it takes until all of them know that they have parted.

    python benchmarks/agreement.py                          # 64, 512 and 2,048 ranks, some minutes each
    python benchmarks/agreement.py --ranks 64 --seconds 6

Every rank is a thread with a connection of its own to one TCPStore, and an `Agreement` that it uses as a model would:
there are no process groups, no models, and nothing is computed. Four phases, one after another:

    sharding          ranks come to the comparison of a model over a third of --seconds
    first graph       ranks come to the comparison of a graph over --seconds
    steady            steps of a graph that was agreed on, for a third of --seconds
    one rank parts    amid such steps one rank is about to run another graph

Requests are those of a rank in a phase, by the seconds that it takes until the last rank has ended it; seconds to the
error are from when one rank parts, the median and the longest. All ranks share the processors of one machine: seconds
are upper bounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from random import Random
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fsdp_compile import RankError
from fsdp_compile.runtime.agreement import Agreement
from fsdp_compile.runtime.comparison import Line
from fsdp_compile.runtime.watching import TICK

MODEL, GRAPH, OTHER = (
    [Line(f"{text} {number} of some hundred, as long as they are") for number in range(200)]
    for text in ("parameter", "all_gather", "reduce_scatter")
)


class CountedStore:
    """A store that counts the requests of its client."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        self.timeout = store.timeout
        self.num_requests = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            self.num_requests += 1
            return call(*args)

        return counted


@dataclasses.dataclass(frozen=True)
class Phase:
    """What was counted in a phase.

    Attributes:
        seconds: until the last rank has ended it.
        requests: of each rank.
        to_error: seconds until each rank's error, if there is one.
    """

    name: str
    seconds: float
    requests: Sequence[int]
    to_error: Sequence[float] = ()

    @property
    def mean(self) -> float:
        """Requests a second and rank."""
        return statistics.mean(self.requests) / self.seconds

    @property
    def busiest(self) -> float:
        """Requests a second of the rank that has most."""
        return max(self.requests) / self.seconds


class Rank:
    """One client, whose methods are phases; each returns when the error came, or None."""

    def __init__(self, rank: int, num_ranks: int, seconds: float, store: dist.TCPStore) -> None:
        self.rank, self.num_ranks, self.seconds = rank, num_ranks, seconds
        self.random = Random(rank)
        self.store = CountedStore(store)
        self.agreement = Agreement(tuple(range(num_ranks)), rank, self.store)

    def sharding(self) -> None:
        self._wait(self.random.uniform(0, self.seconds / 3))
        self.agreement.agree(MODEL)

    def first_graph(self) -> None:
        self._wait(self.random.uniform(0, self.seconds))
        self.agreement.agree_on_graph(GRAPH, ())

    def steady(self) -> None:
        end = time.monotonic() + self.seconds / 3
        while time.monotonic() < end:
            with self.agreement.running(GRAPH):
                self._wait(TICK / 2)

    def one_rank_parts(self) -> tuple[float, float]:
        """When it began, of the rank that parts, and when the error came."""
        self.steady()
        begin = time.monotonic()
        try:
            if self.rank == self.num_ranks // 2:
                self.agreement.agree_on_graph(OTHER, ())
            else:
                with self.agreement.running(GRAPH):
                    while self.agreement.failure is None:
                        self._wait(TICK)
                    raise RuntimeError("the groups have been ended")
        except RankError:
            return begin, time.monotonic()
        raise AssertionError(f"rank {self.rank} has not noticed")

    def _wait(self, seconds: float) -> None:
        """Look once a tick, as the thread of a process does."""
        end = time.monotonic() + seconds
        self._next_look = getattr(self, "_next_look", time.monotonic() + self.random.uniform(0, TICK))
        while self._next_look < end:
            time.sleep(max(0.0, self._next_look - time.monotonic()))
            self.agreement.look()
            self._next_look = time.monotonic() + TICK
        time.sleep(max(0.0, end - time.monotonic()))


def phases(num_ranks: int, seconds: float) -> list[Phase]:
    limit = timedelta(seconds=10 * seconds + 300)
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
    ranks = [
        Rank(rank, num_ranks, seconds, server.clone()) for rank in range(num_ranks)
    ]  # with connections of their own
    found = [
        _phase("sharding", ranks, Rank.sharding),
        _phase("first graph", ranks, Rank.first_graph),
        _phase("steady", ranks, Rank.steady),
    ]
    times: dict[int, tuple[float, float]] = {}
    last = _phase("one rank parts", ranks, lambda rank: times.__setitem__(rank.rank, rank.one_rank_parts()))
    begin = times[num_ranks // 2][0]
    return [*found, dataclasses.replace(last, to_error=[end - begin for _, end in times.values()])]


def _phase(name: str, ranks: Sequence[Rank], run: Callable[[Rank], Any]) -> Phase:
    before = [rank.store.num_requests for rank in ranks]
    errors: list[Exception] = []

    def body(rank: Rank) -> None:
        try:
            run(rank)
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - begin
    if errors:
        raise errors[0]
    counts = [rank.store.num_requests - count for rank, count in zip(ranks, before, strict=True)]
    return Phase(name, seconds, counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--seconds", type=float, default=60.0, help="over which ranks come to the first graph")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection has two ends, both of them here
    threading.stack_size(1 << 20)
    table = Table(
        "ranks", "phase", "seconds", "requests a second and rank", "the busiest", "median s to error", "max s"
    )
    for num_ranks in options.ranks:
        for phase in phases(num_ranks, options.seconds):
            errors = [statistics.median(phase.to_error), max(phase.to_error)] if phase.to_error else []
            numbers = f"{phase.seconds:.0f}", f"{phase.mean:.2f}", f"{phase.busiest:.2f}"
            table.add_row(f"{num_ranks:,}", phase.name, *numbers, *(f"{seconds:.1f}" for seconds in errors))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
