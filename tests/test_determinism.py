"""Graphs and plans do not depend on the seed of Python's hashes."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from fsdp_compile import rewrite
from tests.models import build

for name in ("gpt", "odd_parameters"):
    model = build(name)
    for options in ({}, {"collective_lowering": "grouped"}, {"hardware": "a100-40", "sharding_strategy": "auto"}):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        graphs = rewrite(model, *model.inputs(4, 0), world_size=4, mp_policy=policy, **options)
        print(graphs, graphs.schedule(), graphs.plan, graphs.lowered.forward.code, graphs.lowered.backward.code)
"""


@pytest.fixture(scope="module")
def expected():
    return printed("0")


def printed(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", ["1", "2", "31337"])
def test_graphs_and_plans_are_the_same_for_all_hash_seeds(expected, seed):
    assert "all_gather" in expected
    assert printed(seed) == expected
