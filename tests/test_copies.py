"""Copies between devices, with streams that write down what they are asked to; the meta device stands for a GPU."""

import pytest
import torch

from fsdp_compile.runtime import copies

GPU = torch.device("meta")


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        return Event(f"the end of {self.log[-1]}")

    def synchronize(self):
        self.log.append(f"the host waits for {self.name}")

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


class Event:
    def __init__(self, name):
        self.name = name

    def query(self):
        return True


@pytest.fixture
def log(monkeypatch):
    log = []
    monkeypatch.setattr(copies, "_streams", {})
    monkeypatch.setattr(copies, "_started", {})
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking: log.append("a copy"))
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(f"copies of {device}", log))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream(f"compute of {device}", log))
    return log


@pytest.mark.parametrize(("begin", "end"), [(torch.device("cpu"), GPU), (GPU, torch.device("cpu"))])
def test_a_copy_follows_what_was_computed_and_what_is_computed_next_follows_the_copy(log, begin, end):
    source = torch.empty(3, dtype=torch.bfloat16, device=begin)
    pending = copies._copy_start(source, end, False)
    assert (pending.device, pending.shape, pending.dtype) == (end, source.shape, source.dtype)
    assert log == ["copies of meta waits for compute of meta", "a copy"]
    ready = copies._copy_wait(pending, source)
    assert ready.device == end and log[2:] == ["compute of meta waits for the end of a copy"]
    copies._copies_done([])
    assert log[3:] == ["the host waits for copies of meta"]


def test_a_copy_that_an_error_leaves_behind_lives_until_it_is_done(log):
    copies._copy_start(torch.empty(3), GPU, True)
    (copy,) = copies._started.values()
    assert copy.source.numel() == copy.copied.numel() == 3
    copies._copies_done([])
    assert not copies._started


def test_a_wait_for_what_is_done_waits_for_nothing(log):
    source = torch.empty(3)
    pending = copies._copy_start(source, GPU, True)
    copies._copies_done([source])
    done = len(log)
    copies._copy_wait(pending, source)
    assert len(log) == done
