"""The session of all tests: one directory for Inductor's caches, and the workers end with it."""

import functools
import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests import ranks
from tests.models import DEVICE

# Files that begin first: no process has one left at the end.
LONGEST = ("test_fuzz.py", "test_emulation.py", "test_transformers.py", "test_examples.py")

settings.register_profile("quick", max_examples=200, deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", max_examples=3000, deadline=None, database=None)
settings.load_profile("quick")


@pytest.fixture(scope="module", autouse=True)
def less_garbage() -> None:
    gc.collect()
    gc.freeze()  # what is imported by now stays; the garbage collector need not look through it again and again


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.fixture
def two_ranks(fresh_compiler: None) -> Iterator[None]:
    yield from _among_fake_ranks(2)


@pytest.fixture
def four_ranks(fresh_compiler: None) -> Iterator[None]:
    yield from _among_fake_ranks(4)


def _among_fake_ranks(world_size: int) -> Iterator[None]:
    ranks.join_fake_group(world_size)
    yield
    ranks.join_fake_group(0)


def pytest_configure(config: pytest.Config) -> None:
    # A cache kept from an earlier session could hold graphs that an older version of the passes wrote.
    os.environ.update(ranks.environment())
    if DEVICE.type != "cpu":
        torch.set_default_device(DEVICE)
    torch.set_num_threads(1)
    ranks.collect_garbage_rarely()
    ranks.compile_without_extras()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One worker waits for the other in the end: the shortest files, those of passes, come last.
    items.sort(key=lambda item: (item.path.name not in LONGEST, item.path.parent.name == "passes"))
    for item in items:
        item.runtest = functools.partial(ranks.with_deep_stack, item.runtest)  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.stop_all()
    gc.unfreeze()  # otherwise extensions print what they take for leaks
