"""A process that trains what it is asked to (harness.py): a rank of two hosts, or one of a job that is not there.

With `--world-size` the process group is torch's "fake" one: it has the ranks of a larger job and sends nothing, so that
a rank allocates and does what it would, with wrong values.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocation import Allocation
from harness import Reply, serve
from hosts import sent_bytes
from subjects import SUBJECTS, Training
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from workloads import WORKLOADS

import fsdp_compile.passes.halves as halves
from fsdp_compile.compiler.partitioner import Partitioner
from fsdp_compile.costs import HARDWARE, predict

_WARM_UP = 3


class Rank:
    """Answers requests: the first one starts a training, the others run steps of it."""

    def __init__(self, allocation: Allocation, sent: Callable[[], int]) -> None:
        self.allocation = allocation
        self.sent = sent
        self.training: Training | None = None

    def __call__(self, request: Reply) -> Reply:
        return self.start(**request) if self.training is None else self.steps(**request)

    def start(self, subject: str, workload: str, arguments: Reply, warm_up: int = _WARM_UP, **options: Any) -> Reply:
        """Train for the first time: what that took, the loss after the warm-up, and what `steps` finds."""
        before = processor_seconds()
        with timing_passes() as seconds:
            training = Training(SUBJECTS[subject], WORKLOADS[workload](**arguments), self.allocation, **options)
        spent = processor_seconds() - before
        self.training = training
        for _ in range(warm_up):
            training.step()
        self.allocation.reset()
        return {
            "first": training.first_step,
            "processors": spent,
            "loss": training.loss.item(),
            "parameters": training.parameter_bytes,
            "passes": seconds["passes"],
            "predicted": predicted_peak(training),
            **(self.steps(2) if warm_up else {}),
        }

    def steps(self, count: int, is_profiled: bool = False) -> Reply:
        """Steps that follow each other, after one that is not counted: seconds of the parts of each, and bytes."""
        training = self.training
        dist.barrier()
        training.step()
        sent, processor = self.sent(), time.process_time()
        seconds = [training.step() for _ in range(count)]
        found = {
            "steps": seconds,
            "sent": (self.sent() - sent) / count,
            "cpu": (time.process_time() - processor) / count,
            "state": self.allocation.live,
            "peak": self.allocation.peak,
            "kernels": count_kernels(training) if is_profiled else None,
        }
        if training.device.type == "cuda":
            torch.cuda.empty_cache()  # others are next
        return found


def processor_seconds() -> float:
    """Of this process and of those that it has started, compilers included; 0 where there is no /proc."""
    processes: dict[int, tuple[int, float]] = {}  # its parent, and what it has spent, with children that have ended
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            processes[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found = [os.getpid()]
    for parent in found:
        found += [process for process, (of, _) in processes.items() if of == parent]
    return sum(processes[process][1] for process in found if process in processes)


def predicted_peak(training: Training) -> int | None:
    """Bytes, of a model that fsdp_compile compiled; any hardware will do."""
    graphs = getattr(training.model, "graphs", None)
    return predict(graphs[-1], HARDWARE["h100"]).memory.peak.total if graphs else None


def count_kernels(training: Training) -> int | None:
    """The kernels that a step runs on the GPU, if there is one."""
    if training.device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        training.step()
    return sum(event.count for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)


@contextmanager
def timing_passes() -> Iterator[Reply]:
    """Seconds of fsdp_compile's "passes" and, not among them, of torch's "partitioner", when the block ends."""
    seconds = {"passes": 0.0, "partitioner": 0.0}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += time.perf_counter() - begin
            return result

        return call

    originals = Partitioner.__call__, halves.min_cut_rematerialization_partition
    Partitioner.__call__ = timed("passes", originals[0])
    halves.min_cut_rematerialization_partition = timed("partitioner", originals[1])
    yield seconds
    Partitioner.__call__, halves.min_cut_rematerialization_partition = originals
    seconds["passes"] -= seconds["partitioner"] if seconds["passes"] else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True, help="what allocation.build made")
    parser.add_argument("--world-size", type=int, help="of a job that is not there")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    allocation = Allocation(options.device, options.library)
    torch.set_num_threads(1)
    if options.world_size:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
        torch.set_flush_denormal(True)  # wrong values can be slow ones
    else:
        dist.init_process_group("gloo")
    serve(Rank(allocation, (lambda: 0) if options.world_size else sent_bytes))
    os._exit(0)  # without waiting for a rank that has ended


if __name__ == "__main__":
    main()
