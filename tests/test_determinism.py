"""Graphs and plans do not depend on the seed of Python's hashes."""

import os
import subprocess
import sys

SCRIPT = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from fsdp_compile import rewrite
from tests.models import build

for name in ("odd_parameters", "gpt"):
    model = build(name)
    for options in ({}, {"collective_lowering": "grouped", "hardware": "a100-40"}):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        inputs = model.inputs(4, 0)
        for tensor in inputs if name == "gpt" else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        graphs = rewrite(model, *inputs, world_size=4, mp_policy=policy, **options)
        print(graphs, graphs.schedule(), graphs.plan, graphs.lowered.forward.code, graphs.lowered.backward.code)
"""


def test_graphs_and_plans_are_the_same_for_any_hash_seed():
    command = [sys.executable, "-c", SCRIPT]
    processes = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("0", "31337")
    ]
    first, second = [process.communicate(timeout=240)[0] for process in processes]
    assert "all_gather" in first
    assert first == second
