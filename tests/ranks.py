"""Tests on real ranks: one set of gloo worker processes per world size, started once and reused by all tests.

    @on_ranks(2, 4)
    def test_sum(world_size):                   # the body runs on every rank
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world_size

    results = run_on_ranks(2, function, *args)  # the same as a call: one result per rank

A worker waits on a pipe, so an idle pool costs no processor time. The function travels by its name (it has to
live in a module), arguments and results by pickle. Whatever goes wrong on a rank ends its pool, because ranks
that stopped at different places share no usable process group any more: the exception is raised again in the
test with the rank's traceback, and the next test starts a fresh pool.

With TESTS_DEVICE=cuda in the environment, ranks train on GPUs, over NCCL, and GPUs are their default device. Ranks may
share a GPU: NCCL 2.30 allows that if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.models import DEVICE

TIME_LIMIT = 240.0  # seconds a function may take, its compilation by Inductor included
START_LIMIT = 120.0  # seconds until every worker has imported torch and joined the process group
GRACE = 3.0  # seconds the other ranks get to report once one has failed; longer ones hang in a collective
LOG_TAIL = 6000  # bytes of a worker's output shown with a failure
MOST_THREADS = 30  # of a worker, until others take its place

_worker = False  # True inside a worker process
_pools: dict[int, RankPool] = {}


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, time_limit: float = TIME_LIMIT
) -> list[Any]:
    """Call `function(*args)` on every rank of a process group; its results in rank order."""
    __tracebackhide__ = True  # what failed is in the rank's traceback
    if world_size in _pools and _pools[world_size].is_worn:
        _pools.pop(world_size).stop()
    if world_size not in _pools:
        _pools[world_size] = RankPool(world_size)
    try:
        return _pools[world_size].run(function, args, time_limit)
    except BaseException:  # KeyboardInterrupt and pytest's own included: the pool is in an unknown state
        _pools.pop(world_size).stop()
        raise


def on_ranks(*world_sizes: int, time_limit: float = TIME_LIMIT) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the body of a test on every rank, once per world size, which is its first parameter."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            if _worker:  # pickle found this wrapper under the test's name
                body(**arguments)
                return
            run = functools.partial(test, **arguments)
            run_on_ranks(arguments["world_size"], run, time_limit=time_limit)

        assert next(iter(inspect.signature(body).parameters)) == "world_size", body
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def run_until_parted(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of a function after which the ranks do not go on together."""
    try:
        return run_on_ranks(world_size, function, *args)
    finally:
        if world_size in _pools:
            _pools.pop(world_size).stop()


def use_device(rank: int) -> str:
    """Use the GPU of this rank, if ranks train on GPUs; the backends of a process group."""
    if DEVICE.type == "cpu":
        return "gloo"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.backends.cudnn.allow_tf32 = False  # convolutions are compared in float32; matmuls are by default
    return "cpu:gloo,cuda:nccl"  # what is offloaded is gathered by gloo


def join_fake_group(world_size: int, rank: int = 0, backend: str = "fake") -> None:
    """This process takes the place of a rank among `world_size`, in a group that sends nothing; with 0, of none."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if world_size:
        dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=world_size)


def stop_all() -> None:
    """End every worker and remove their files; called once, at the end of the session."""
    while _pools:
        _pools.popitem()[1].stop()
    shutil.rmtree(session_directory(), ignore_errors=True)


@functools.cache
def session_directory() -> Path:
    """Inductor's caches and the workers' logs: shared by all ranks, so the same code is compiled once."""
    return Path(tempfile.mkdtemp(prefix="ranks-"))


def environment() -> dict[str, str]:
    """What a worker (and the session itself) needs set before it imports torch."""
    return {
        **({"CUDA_VISIBLE_DEVICES": ""} if DEVICE.type == "cpu" else {}),  # a forked worker could not use what is there
        "OMP_NUM_THREADS": "1",
        "FSDP_COMPILE_HARDWARE": "0",  # schedules that tests look at do not depend on this machine
        "XDG_CACHE_HOME": str(session_directory() / "cache"),  # nor on what was kept before
        "TORCHINDUCTOR_CACHE_DIR": str(session_directory() / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compile in the process itself: no further pool of workers
    }


def start_process(target: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """A process that has imported torch already, where that can be forked."""
    if DEVICE.type == "cpu":
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])
    else:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    process: multiprocessing.process.BaseProcess = context.Process(target=target, args=arguments, daemon=True)
    with _patched_environ(environment() | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}):  # threads that start compilers
        process.start()
    return process


class RankTraceback(Exception):
    """The traceback of a rank as text, shown as the cause of the exception raised in the test."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    exception: BaseException
    traceback: str


class RankPool:
    """The worker processes of one world size, joined in one process group."""

    def __init__(self, world_size: int) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"{world_size}-", dir=session_directory()))
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.pipes: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()
            process = start_process(_serve, rank, world_size, self.store.port, theirs, self._log(rank))
            theirs.close()  # otherwise a dead worker's pipe would never report its end
            self.pipes.append(ours)
            self.processes.append(process)
        self.ready = False

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], time_limit: float) -> list[Any]:
        __tracebackhide__ = True
        if not self.ready:
            self._results(START_LIMIT, "start")
            self.ready = True
        request = pickle.dumps((function, args))
        for pipe in self.pipes:
            pipe.send_bytes(request)
        return self._results(time_limit, "finish")

    @property
    def is_worn(self) -> bool:
        """Whether the groups that tests have made take much time by now.

        Each has a thread of gloo that looks for messages a hundred times a second, also while nothing runs.
        """
        threads = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return any(path.exists() and len(list(path.iterdir())) > MOST_THREADS for path in threads)

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # an idle worker returns at the end of its pipe
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def _results(self, time_limit: float, what: str) -> list[Any]:
        __tracebackhide__ = True
        replies = self._replies(time_limit)
        failures = {rank: reply for rank, reply in replies.items() if isinstance(reply, Failure)}
        if failures:
            self._raise_first(failures)
        silent = [rank for rank in range(len(self.pipes)) if rank not in replies]
        if silent:
            raise TimeoutError(f"ranks {silent} did not {what} within {time_limit:g} s{self._stacks(silent)}")
        return [replies[rank] for rank in range(len(self.pipes))]

    def _replies(self, time_limit: float) -> dict[int, Any]:
        """Reply of each rank that answered in time, the earliest first."""
        replies: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline = time.monotonic() + time_limit
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                replies[rank] = self._receive(rank)
                if isinstance(replies[rank], Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(GRACE)
            return Failure(
                ChildProcessError(f"the process ended with {self.processes[rank].exitcode}"), self._tail(rank)
            )

    def _raise_first(self, failures: dict[int, Failure]) -> None:
        first, *others = failures
        exception = failures[first].exception
        for rank in others:
            exception.add_note(f"rank {rank}: {_one_line(failures[rank].exception)}")
        exception.add_note(f"output of rank {first}:\n{self._tail(first)}")
        raise exception from RankTraceback(f"rank {first}:\n{failures[first].traceback}")

    def _stacks(self, ranks: list[int]) -> str:
        """Where each of the ranks is at this moment: faulthandler writes it to the log."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # type: ignore[arg-type]
        time.sleep(0.5)
        return "".join(f"\nrank {rank}:\n{self._tail(rank)}" for rank in ranks)

    def _log(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    def _tail(self, rank: int) -> str:
        log = self._log(rank)
        return log.read_bytes()[-LOG_TAIL:].decode(errors="replace") if log.exists() else ""


def with_deep_stack(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with room for the frames of all that it calls.

    CPython 3.11 allocates frames in pieces of 16 KiB and gives each back as soon as it is empty. Calls that cross the
    end of a piece again and again, as they do in traces, take a sixth of the time of a test. A frame that is larger
    than a piece has a piece of its own, about half of which is left for other frames.
    """
    __tracebackhide__ = True
    return function(*args)


with_deep_stack.__code__ = with_deep_stack.__code__.replace(co_stacksize=140_000)  # of 8 bytes each: a piece of 2 MiB


def collect_garbage_rarely() -> None:
    """Traces make many objects and few cycles: looking for these takes a tenth of the time of a test by default."""
    gc.set_threshold(100_000, 20, 100)


def compile_without_extras() -> None:
    """After a compilation, Dynamo empties the processor's caches to measure guards, and looks for garbage."""
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    torch._dynamo.config.run_gc_after_compile = False


def _one_line(exception: BaseException) -> str:
    return f"{type(exception).__name__}: {exception}".splitlines()[0]


@contextlib.contextmanager
def _patched_environ(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(rank: int, world_size: int, port: int, pipe: Connection, log: Path) -> None:
    """The life of a worker: join the process group, then answer calls until the pipe ends."""
    global _worker
    _worker = True
    _redirect_output(log)
    gc.freeze()  # what came with the fork: looking through it would copy it
    collect_garbage_rarely()
    compile_without_extras()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    torch.set_num_threads(1)
    store = dist.TCPStore("localhost", port)
    timeout = datetime.timedelta(seconds=TIME_LIMIT)
    dist.init_process_group(use_device(rank), store=store, rank=rank, world_size=world_size, timeout=timeout)
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            break
        pipe.send_bytes(_answer(request, log))
    sys.stdout.flush()
    os._exit(0)  # no destructors: a peer may be gone already, and the process group would wait for it


def _answer(request: bytes, log: Path) -> bytes:
    os.truncate(log, 0)  # what a failure shows is of this call only
    _forget_the_last_test()
    try:
        function, args = pickle.loads(request)
        return pickle.dumps(with_deep_stack(function, *args))
    except BaseException as exception:  # pytest.fail raises no Exception
        return _pickled_failure(exception)


def _forget_the_last_test() -> None:
    torch._dynamo.reset()
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)
    gc.collect()
    gc.freeze()  # what is imported stays; looking through it before every test takes longer than many tests
    torch.manual_seed(0)
    random.seed(0)


def _pickled_failure(exception: BaseException) -> bytes:
    text = "".join(traceback.format_exception(exception))
    sys.stdout.flush()
    sys.stderr.flush()
    plain = RuntimeError(_one_line(exception))
    with contextlib.suppress(Exception):  # many exceptions pickle, but need arguments to come back
        exception.__traceback__ = None
        request = pickle.dumps(Failure(exception, text))
        pickle.loads(request)
        return request
    return pickle.dumps(Failure(plain, text))


def _redirect_output(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
