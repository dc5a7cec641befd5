"""The session of all tests: one directory for Inductor's caches, and the workers end with it."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import ranks

settings.register_profile("quick", max_examples=300, deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", max_examples=3000, deadline=None, database=None)
settings.load_profile("quick")


ONE_AFTER_ANOTHER = ("distributed", "test_examples.py", "test_packaging.py", "test_transformers.py")


@pytest.hookimpl(tryfirst=True)  # xdist looks for groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `-n 2 --dist loadgroup`, tests that start processes run one after another, beside all others."""
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        group = "processes" if path.parts[0] in ONE_AFTER_ANOTHER else str(path)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_configure(config: pytest.Config) -> None:
    # A cache kept from an earlier session could hold graphs that an older version of the passes wrote.
    os.environ.update(ranks.environment())
    torch.set_num_threads(1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    ranks.stop_all()
