"""A plugin of pytest: imports the shim first, runs the tests that are asked for, and writes down what came out."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

import tests.conformance.shim  # noqa: F401
from tests.conformance.convert import name_of

LONGEST = 6000  # characters kept of what a test raised


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(Path(os.environ["CONFORMANCE_RECORD"])))


class Recorder:
    def __init__(self, record: Path) -> None:
        self.results = record.open("a")
        wanted = os.environ.get("CONFORMANCE_TESTS")
        self.wanted = None if wanted is None else set(json.loads(Path(wanted).read_text()))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if self.wanted is None or id_of(item.nodeid) in self.wanted]
        if config.option.collectonly:
            for item in chosen:
                self._write(id=id_of(item.nodeid), function=function_of(item))
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(id=id_of(report.nodeid), outcome="failed", seconds=0.0, message=str(report.longrepr)[-LONGEST:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if type(report) is not pytest.TestReport:  # a part of a test, whose failure is the test's, too
            return
        is_result = report.when == "call" or report.outcome != "passed"
        if is_result and not (report.when == "teardown" and report.skipped):
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            self._write(
                id=id_of(report.nodeid), outcome=report.outcome, seconds=report.duration, message=message[-LONGEST:]
            )

    def _write(self, **result: Any) -> None:
        print(json.dumps(result), file=self.results, flush=True)


def function_of(item: Any) -> str:
    """The same for all sets of parameters of a test: PyTorch makes functions of other names of them."""
    function = inspect.unwrap(item.function)
    return f"{item.cls.__name__ if item.cls else ''}:{function.__code__.co_firstlineno}"


def id_of(nodeid: str) -> str:
    """fsdp/test_fsdp_core.py::TestHooks::test_x, as it is called in PyTorch."""
    file, *rest = nodeid.split("::")
    return "::".join([name_of(Path(file).stem), *rest])
