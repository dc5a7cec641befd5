"""The session of all tests: one directory for Inductor's caches, and the workers end with it."""

import gc
import os

import pytest
import torch
from hypothesis import settings

from tests import ranks

settings.register_profile("quick", max_examples=300, deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", max_examples=3000, deadline=None, database=None)
settings.load_profile("quick")


def pytest_configure(config: pytest.Config) -> None:
    # A cache kept from an earlier session could hold graphs that an older version of the passes wrote.
    os.environ.update(ranks.environment())
    torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was imported stays; the garbage collector need not look through it again and again


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.stop_all()
