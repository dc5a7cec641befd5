"""The workers themselves: results, exceptions, hangs and crashes of a rank, and what the next test finds."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import on_ranks, run_on_ranks


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def rank_and_sum(value):
    total = torch.tensor(float(value))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads(), torch.rand(1).item()


def process_id():
    return os.getpid()


def fail_on_rank_1(exception):
    if dist.get_rank() == 1:
        raise exception
    dist.barrier()


def raise_unpicklable():
    raise Unpicklable(1, 2)


def wait_for_nobody():
    if dist.get_rank() == 0:
        dist.barrier()


def crash():
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_come_in_rank_order(world_size):
    results = run_on_ranks(world_size, rank_and_sum, 3)
    same_seed = results[0][3]
    assert results == [(rank, 3.0 * world_size, 1, same_seed) for rank in range(world_size)]


@on_ranks(2, 3)
def test_a_body_runs_on_every_rank(world_size):
    assert dist.get_world_size() == world_size
    assert ranks._worker


def test_workers_are_reused():
    assert run_on_ranks(2, process_id) == run_on_ranks(2, process_id)


def test_an_exception_of_a_rank_is_raised_with_its_traceback():
    with pytest.raises(KeyError, match="gone") as caught:
        run_on_ranks(2, fail_on_rank_1, KeyError("gone"))
    assert "rank 1:" in str(caught.value.__cause__)
    assert "in fail_on_rank_1" in str(caught.value.__cause__)
    assert run_on_ranks(2, rank_and_sum, 1)[0][1] == 2.0  # a fresh pool


def test_an_exception_that_does_not_pickle_keeps_its_text():
    with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2"):
        run_on_ranks(2, raise_unpicklable)


def test_a_hang_ends_at_the_time_limit_and_shows_where():
    run_on_ranks(2, rank_and_sum, 1)  # the pool is up: the limit below is for the function alone
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not finish within 2 s(.|\n)*wait_for_nobody"):
        run_on_ranks(2, wait_for_nobody, time_limit=2)
    assert time.monotonic() - start < 30
    assert run_on_ranks(2, rank_and_sum, 1)[0][1] == 2.0


def test_a_crash_is_reported():
    with pytest.raises(ChildProcessError, match="ended with 7"):
        run_on_ranks(2, crash)


def test_idle_workers_take_no_processor_time():
    run_on_ranks(2, rank_and_sum, 1)
    processes = ranks._pools[2].processes
    before = [_processor_ticks(process.pid) for process in processes]
    time.sleep(1.0)
    after = [_processor_ticks(process.pid) for process in processes]
    assert all(b - a <= 2 for a, b in zip(before, after, strict=True))  # ticks are 10 ms


def _processor_ticks(pid):
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
