"""Predictions of what published runs have: attention, checkpointing, no compiler; and the script that compares."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdp_compile.costs.nodes import flops_of, kernels_of
from fsdp_compile.passes import analysis

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mpt
import published

import llama

TINY = mpt.MPTConfig(layers=2, dim=64, heads=4, vocab=128, seq=32)
BATCH, PARAMETERS_OF_LAYER = 4, 12 * TINY.dim**2

ROW = dataclasses.replace(
    published.ROWS[-1],
    source="llm-foundry",
    model=lambda: mpt.MPT(TINY),
    title="tiny",
    gpus=8,
    batch=BATCH,
    seq=TINY.seq,
    published=1e5,
    published_mfu=0.1,
    published_gib=0.5,
    units="auto",
)


@pytest.fixture(scope="module")
def graphs():
    """With every layer checkpointed."""
    return published.graphs_of(ROW, None, ROW.gpus)


def attention_flops(graph):
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    named = [node for node in nodes if "attention" in f"{node.target} {node.args[:2]}" and len(node.users)]
    return [flops_of(node) for node in named if analysis.is_heavy(node)]


def test_attention_has_flops_where_it_is_computed_again(graphs):
    matmul = 2 * BATCH * TINY.seq**2 * TINY.dim
    assert attention_flops(graphs.forward.graph) == [2 * matmul] * TINY.layers
    backward = attention_flops(graphs.backward.graph)
    assert sorted(backward) == sorted([2 * matmul, 5 * matmul] * TINY.layers)


def test_flops_of_the_forward_are_those_of_the_formula(graphs):
    tokens = BATCH * TINY.seq
    expected = 2 * tokens * (TINY.layers * PARAMETERS_OF_LAYER + TINY.vocab * TINY.dim)
    expected += TINY.layers * 4 * tokens * TINY.seq * TINY.dim
    heavy = [node for node in graphs.forward.graph.nodes if analysis.is_heavy(node)]
    matmuls = [node for node in heavy if "embedding" not in str(node.target)]
    assert sum(map(flops_of, matmuls)) == expected


def test_without_a_compiler_an_operator_is_one_kernel(graphs):
    def kernels_with(origin, compiler):
        kernels = kernels_of(graphs.forward.graph, compiler=compiler)
        return sum(any(str(node.meta.get("original_aten")) == origin for node in kernel.nodes) for kernel in kernels)

    assert kernels_with("aten.gelu.default", "eager") == TINY.layers
    assert kernels_with("aten.gelu.default", "aot_eager") > TINY.layers


def test_checkpointing_takes_time_and_saves_memory(graphs):
    checkpointed = published.result_of(ROW, graphs)
    row = dataclasses.replace(ROW, checkpointing="none")
    plain = published.result_of(row, published.graphs_of(row, None, row.gpus))
    assert checkpointed.prediction.flops > plain.prediction.flops
    assert checkpointed.prediction.model_flops == pytest.approx(plain.prediction.model_flops, rel=1e-3)
    held = [result.prediction.memory.peak.held["activations"] for result in (checkpointed, plain)]
    assert held[0] < held[1]


@pytest.mark.parametrize(
    "config, num_parameters",
    [(mpt.MPT_7B, 6_658_859_008), (mpt.MPT_13B, 12_853_954_560), (mpt.MPT_70B, 64_862_437_376)],
)
def test_models_have_the_published_number_of_parameters(config, num_parameters):
    with torch.device("meta"):
        model: nn.Module = mpt.MPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_the_script_prints_the_table_and_the_fit(capsys):
    selective = dataclasses.replace(ROW, checkpointing="selective", is_compiled=True)
    split = dataclasses.replace(ROW, model=lambda: llama.Llama(llama.SMALL), split=2)
    published.main(["--only", "tiny", "--fit"], [ROW, selective, split])
    lines = capsys.readouterr().out.splitlines()
    assert sum("llm-foundry │ tiny" in line for line in lines) == 3
    assert any(line.startswith("a100: efficiency 0.") for line in lines)
