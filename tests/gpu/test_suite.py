"""The suite for GPUs, run to its end on an emulated one; and that what fails is reported."""

import math
import time
from importlib.util import find_spec

import pytest

from tests.gpu import __main__ as suite
from tests.gpu import parts
from tests.gpu.machine import Machine
from tests.gpu.processes import Ran, run_cases
from tests.gpu.report import FAILED, NOT_RUN, PASSED, Outcome

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (extra gpu)")
EMULATED = Machine(gpus=())
CLOSE = parts._close(EMULATED)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(Machine, "at_hand", classmethod(lambda cls: EMULATED))


def test_the_suite_runs_to_its_end_on_an_emulated_gpu(tmp_path, capsys):
    status = suite.main(["--smallest", "--out", str(tmp_path / "new" / "report.md")])
    report = (tmp_path / "new" / "report.md").read_text()
    assert status == 0, report
    assert "an emulated GPU: 3 passed, 3 not run" in report.partition("\n")[0]
    for part in ("parity on 2 ranks", "predictions, one rank of 8", "CUDA graphs on 2 ranks", "one rank of 8"):
        assert f"## {part}" in report
    assert "There was no GPU" in report and report.count("(emulated)") == 5 and report.count("Stand-in: ") == 4
    assert "nothing was measured" in report and '"predicted_bytes"' in report
    assert "to send: " in capsys.readouterr().out


def test_what_fails_is_a_line_and_the_rest_goes_on(tmp_path, monkeypatch):
    def breaks(setting):
        yield Outcome("first", "a case", PASSED)
        raise RuntimeError("no such luck")

    for name, part in {"parity": breaks, "predictions": lambda setting: iter(()), "one-rank": _passes}.items():
        monkeypatch.setitem(suite.PARTS, name, part)
    status = suite.main(["--parts", "parity", "predictions", "one-rank", "--out", str(tmp_path / "report.md")])
    report = (tmp_path / "report.md").read_text()
    assert status == 1 and "2 passed, 2 FAILED" in report
    assert "| the part itself | FAILED | RuntimeError('no such luck') |" in report and "in breaks" in report
    assert "it tried nothing" in report


def _passes(setting):
    yield Outcome("last", "a case", PASSED)


def test_a_case_that_fails_on_a_rank_has_its_traceback_and_the_next_one_runs():
    cases = ["no_such_case odd_mlp", "first_gradients odd_mlp"]
    failed, ran = run_cases(EMULATED, "gloo", 2, cases, time.monotonic() + 200)
    assert "no_such_case" in failed.error and "Traceback" in failed.error
    assert not ran.error and len(ran.found) == 2
    assert parts.compared("parity", failed, CLOSE).status == FAILED
    assert parts.compared("parity", ran, CLOSE).status == PASSED


def test_what_is_not_begun_in_time_has_failed():
    (ran,) = run_cases(EMULATED, "gloo", 2, ["trained odd_mlp"], time.monotonic() - 1)
    assert "time was up" in ran.error
    (outcome,) = parts.one_rank(parts.Setting(EMULATED, time.monotonic() - 1, is_smallest=True))
    assert outcome.status == FAILED and "time was up" in outcome.found


@pytest.mark.parametrize(("distance", "status"), [(1e-6, PASSED), (1e-3, FAILED), (math.nan, FAILED)])
def test_distances_of_all_ranks_count(distance, status):
    ranks = [{"losses": 0.0, "kernels": 3, "seconds": 1}, {"losses": distance, "kernels": 3, "seconds": 2}]
    assert parts.compared("parity", Ran("trained gpt", ranks), CLOSE).status == status


def test_nothing_that_is_compared_has_failed():
    assert parts.compared("parity", Ran("trained gpt", [{"kernels": 3, "seconds": 1}]), CLOSE).status == FAILED


@pytest.mark.parametrize(("measured", "status"), [(105, PASSED), (130, FAILED), (70, FAILED)])
def test_memory_that_was_mispredicted_has_failed_and_time_is_told(measured, status):
    rank = {"predicted_bytes": 100, "measured_bytes": measured, "measured_seconds": 0.003, "seconds": 1}
    known = {**rank, "predicted_seconds": 0.002, "hardware": "h100"}
    memory, seconds = parts._against_measured("predictions", Ran("predicted large", [known]))
    assert memory.status == status
    assert seconds.status == PASSED and "predicted 2.00 ms for h100, measured 3.00 (+50.0%)" in seconds.found
    unknown = {**rank, "predicted_seconds": None, "hardware": None}
    _, seconds = parts._against_measured("predictions", Ran("predicted large", [unknown]))
    assert seconds.status == NOT_RUN and "measured 3.00 ms" in seconds.found


def test_a_subject_that_fails_keeps_its_traceback():
    broken = {"world_size": 8, "subject": "fsdp2", "error": "RuntimeError: no\nTraceback ..."}
    eager = {"world_size": 8, "subject": "fsdp2, CUDA graphs", "error": "CUDA graphs are torch.compile's, and so on"}
    first, second = (parts._row("one rank of 8", row, [broken, eager]) for row in (broken, eager))
    assert (first.status, first.found, second.status) == (FAILED, "RuntimeError: no", NOT_RUN)
    assert "Traceback" in first.error and not second.error


def test_machines_with_gpus_are_joined_by_nccl_where_each_rank_has_one():
    assert Machine(("H100",)).ranks == ("gloo", 2) and "share the GPU" in Machine(("H100",)).stand_in
    assert Machine(("H100",) * 16).ranks == ("nccl", 8) and Machine(("H100",) * 2).stand_in == ""
