"""The program of a GPU, run on ranks of the CPU, trains as the eager model. cases.py has what a rank does."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_compile

pytest.importorskip("triton", reason="kernels of a GPU run in Triton's interpreter: pip install triton")

ROOT = Path(__file__).parents[2]
LAUNCH = Path(fsdp_compile.__file__).parent / "emulation/launch.py"
NUM_RANKS = 2
CLOSE = 1e-5
ROUGH = 4e-2
"""Of what is computed in bf16: its 8 bits round each result by up to 0.4 %, and programs round at different places."""

SMALL = {
    "packed odd_mlp": CLOSE,
    "poisoned odd_mlp": CLOSE,
    "trained adapted": CLOSE,
    "accumulated odd_mlp": CLOSE,
    "accumulated odd_mlp packed": CLOSE,
    "without_gradients odd_mlp": CLOSE,
    "mixed odd_mlp": ROUGH,
    "integers grouped": CLOSE,
}


def run(tmp_path, *cases):
    """What each case found on the ranks, by its name."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(NUM_RANKS):
        arguments = [str(rank), str(NUM_RANKS), str(tmp_path / "store"), *cases]
        found = [sys.executable, "-P", str(LAUNCH), "--run", "h100", "tests.emulation.on_rank", *arguments]
        with (tmp_path / f"rank{rank}").open("w") as output:
            processes.append(subprocess.Popen(found, env=environment, stdout=output, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait(timeout=300)
    finally:
        for process in processes:
            process.kill()
    return {case: [_found(tmp_path / f"rank{rank}", case) for rank in range(NUM_RANKS)] for case in cases}


def _found(output, case):
    lines = output.read_text().splitlines()
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    for result in results:
        if result.pop("case") == case and "error" not in result:
            assert result.pop("kernels") > 0
            del result["seconds"]
            return result
    raise AssertionError(f"{case}: {output}\n" + "\n".join(lines[-40:]))


def is_within(tolerance, results):
    return all(value <= tolerance for result in results for value in result.values())


def test_small_models_train_as_in_eager(tmp_path):
    for case, results in run(tmp_path, *SMALL).items():
        assert is_within(SMALL[case], results), (case, results)


def test_a_convolution_net_trains_as_in_eager(tmp_path):
    ((_, results),) = run(tmp_path, "replicas").items()
    assert is_within(CLOSE, results), results


def test_transformers_have_the_gradients_of_eager(tmp_path):
    """One with tied weights whose blocks are computed again, and one whose heads share keys."""
    for case, results in run(tmp_path, "first_gradients checkpointed", "first_gradients llama").items():
        assert is_within(CLOSE, results), (case, results)


def test_a_wait_or_a_kernel_that_is_missing_shows(tmp_path):
    without_a_kernel, without_waits = run(tmp_path, "without_a_kernel odd_mlp", "without_waits odd_mlp").values()
    assert all(math.isnan(value) for result in without_waits for value in result.values())
    assert not is_within(1e-3, without_a_kernel)
