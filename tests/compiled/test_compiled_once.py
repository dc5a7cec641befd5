"""Threads stand for the processes that share a cache of compiled code; their locks are as separate."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from filelock import FileLock
from torch import fx

from fsdp_compile.runtime.compiled_once import compiled_once


def graph_of(function):
    return fx.symbolic_trace(lambda x: function(x))


def held(graph, entered, go_on):
    with compiled_once(graph) as by_another:
        entered.set()
        assert go_on.wait(60)
    return by_another


def met_inside(graph, barrier):
    with compiled_once(graph) as by_another:
        barrier.wait(60)
    return by_another


@pytest.fixture
def waiting(monkeypatch):
    """Counts those who wait for a lock."""
    waiting = threading.Semaphore(0)

    class Counted(FileLock):
        def acquire(self, timeout=None, **options):
            if timeout:
                waiting.release()
            return super().acquire(timeout, **options)

    monkeypatch.setattr("fsdp_compile.runtime.compiled_once.FileLock", Counted)
    return waiting


@pytest.fixture
def first():
    """A process that compiles; the function lets it end, and returns whether another had compiled before."""
    entered, go_on = threading.Event(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        result = pool.submit(held, graph_of(torch.sin), entered, go_on)
        assert entered.wait(60)
        yield pool, lambda: (go_on.set(), result.result(60))[1]
        go_on.set()


def test_others_wait_for_the_first_and_then_go_on_side_by_side(waiting, first):
    """What Inductor does not cache takes them no longer than two compilations."""
    pool, end = first
    barrier = threading.Barrier(2)
    others = [pool.submit(met_inside, graph_of(torch.sin), barrier) for _ in range(2)]
    assert waiting.acquire(timeout=60) and waiting.acquire(timeout=60)
    assert barrier.n_waiting == 0
    assert end() is False
    assert [other.result(60) for other in others] == [True, True]


def test_another_graph_is_compiled_meanwhile(first):
    with compiled_once(graph_of(torch.cos)) as by_another:
        assert not by_another


@pytest.mark.parametrize("setting", [{"fx_graph_cache": False}, {"force_disable_caches": True}], ids=str)
def test_nobody_waits_for_what_is_not_kept(first, setting):
    with torch._inductor.config.patch(setting), compiled_once(graph_of(torch.sin)) as by_another:
        assert not by_another


def test_nobody_waits_where_ranks_tune_kernels_together(first):
    tuning = torch._inductor.config.patch("distributed_max_autotune_gemm", True)
    with tuning, compiled_once(graph_of(torch.sin)) as by_another:
        assert not by_another


def test_a_process_that_does_not_end_is_not_waited_for(first, monkeypatch):
    monkeypatch.setattr("fsdp_compile.runtime.compiled_once.LOCK_TIMEOUT", 0.2)
    with compiled_once(graph_of(torch.sin)) as by_another:
        assert by_another


def test_a_lock_that_cannot_be_made_is_not_waited_for(tmp_path, monkeypatch):
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    monkeypatch.setattr("fsdp_compile.runtime.compiled_once.get_lock_dir", lambda: str(not_a_folder))
    with compiled_once(graph_of(torch.sin)) as by_another:
        assert not by_another


def test_a_cache_without_a_place_for_locks_is_read_all_the_same(tmp_path, monkeypatch):
    not_a_folder = tmp_path / "file"
    not_a_folder.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(not_a_folder))
    with compiled_once(graph_of(torch.sin)) as by_another:
        assert not by_another
