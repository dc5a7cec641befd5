"""A plugin of pytest: imports the shim before the tests, runs those that are asked for, and writes down what came out."""

from __future__ import annotations

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
                self._write(id=id_of(item.nodeid))
        items[:] = chosen

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(id=id_of(report.nodeid), outcome="failed", seconds=0.0, message=str(report.longrepr)[-LONGEST:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_result = report.when == "call" or report.outcome != "passed"
        if is_result and not (report.when == "teardown" and report.skipped):
            message = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
            self._write(
                id=id_of(report.nodeid), outcome=report.outcome, seconds=report.duration, message=message[-LONGEST:]
            )

    def _write(self, **result: Any) -> None:
        print(json.dumps(result), file=self.results, flush=True)


def id_of(nodeid: str) -> str:
    """fsdp/test_fsdp_core.py::TestHooks::test_x, as it is called in PyTorch."""
    file, *rest = nodeid.split("::")
    return "::".join([name_of(Path(file).stem), *rest])
