"""The program of a GPU, compiled and checked in a process that emulates one: `emulated.py` has the tests."""

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fsdp_compile
from fsdp_compile.cli.build import _given, add_build
from fsdp_compile.emulation.command import options_of
from tests import ranks

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (extra gpu)")
ROOT = Path(__file__).parents[2]
LAUNCH = Path(fsdp_compile.__file__).parent / "emulation/launch.py"


def run(*command):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, **ranks.environment(), "PYTHONPATH": paths, "COLUMNS": "200"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


def test_what_is_checked_in_a_process_that_emulates():
    tests = str(Path(__file__).with_name("emulated.py"))
    found = run(sys.executable, "-P", str(LAUNCH), "h100", "pytest", "-q", "-p", "no:cacheprovider", tests)
    assert found.returncode == 0 and " passed" in found.stdout, found.stdout[-5000:] + found.stderr[-2000:]


MODEL = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

def inputs(batch, seq):
    return (torch.zeros(batch, seq, 64),)
"""


@pytest.mark.parametrize("gpu", ["b200"])
def test_build_writes_the_program_of_a_gpu(gpu, tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    command = [sys.executable, "-m", "fsdp_compile", "build", f"{tmp_path}/net.py:model", "--gpus", "4", "--seq", "8"]
    found = run(*command, "--hardware", gpu, "--out", str(tmp_path / "out"))
    assert found.returncode == 0, found.stdout + found.stderr
    kernels = json.loads((tmp_path / "out/kernels.json").read_text())
    assert all(kernel["registers"] > 0 and kernel["num_bytes"] > 0 for kernel in kernels)
    assert {kernel["name"] for kernel in kernels if "gelu" in kernel["name"]}
    for name in ("forward.py", "backward.py", "forward.steps.txt", "backward.steps.txt", "schedule.txt"):
        assert (tmp_path / "out" / name).read_text()
    assert "reduce_scatter_tensor_coalesced" in (tmp_path / "out/backward.py").read_text()
    assert "every check holds" in found.stdout and "predicted from these kernels" in found.stdout


@pytest.mark.parametrize(
    "flag",
    ["--strategy=NO_SHARD", "--lowering=packed", "--param-dtype=bfloat16", "--reduce-dtype=float16", "--offload"],
)
def test_build_hands_every_option_on(flag):
    def parsed(*arguments):
        parser = argparse.ArgumentParser()
        add_build(parser.add_subparsers())
        return parser.parse_args(["build", "net.py:model", *arguments])

    assert parsed(*_given(parsed(flag))) == parsed(flag)
    assert options_of(parsed(flag)) != options_of(parsed())


def test_build_says_what_is_wrong_with_its_arguments(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    found = run(sys.executable, "-m", "fsdp_compile", "build", f"{tmp_path}/net.py:nothing")
    assert found.returncode == 1 and "no function 'nothing'" in found.stderr


ATTENTION = """
import sys
import torch
from torch import nn
from fsdp_compile import rewrite

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x):
        x = self.project(x).view(2, 3, 4, 16).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).float().sum()

with torch.device("meta"):
    model, x = Attention(), torch.zeros(2, 3, 64, dtype=torch.bfloat16)
graphs = rewrite(model, x, world_size=2, device=sys.argv[1])
for side in (graphs.forward, graphs.backward):
    print(*(node.target for node in side.graph.nodes if "attention" in str(node.target)), sep="\\n")
"""


def test_emulate_runs_a_script_that_rewrites_for_a_gpu(tmp_path):
    (tmp_path / "attend.py").write_text(ATTENTION)
    for device in ("cuda", "cpu"):
        command = [sys.executable, "-m", "fsdp_compile", "emulate", "--hardware", "h200", str(tmp_path / "attend.py")]
        found = run(*command, device)
        assert found.returncode == 0, found.stderr
        expected = "aten._scaled_dot_product_flash_attention" + ("_for_cpu" if device == "cpu" else "")
        assert found.stdout.split() == [f"{expected}.default", f"{expected}_backward.default"]


def test_emulate_says_what_it_runs(tmp_path):
    found = run(sys.executable, "-m", "fsdp_compile", "emulate", str(tmp_path / "nothing.py"))
    assert found.returncode == 1 and "there is no script" in found.stderr


def test_a_gpu_that_is_not_described_is_refused():
    found = run(sys.executable, "-P", str(LAUNCH), "riva128", "pytest")
    assert found.returncode == 1 and "no GPU 'riva128' is described: one of a100-40, a100-80, h100" in found.stderr
