"""What a careful engineer would ask of the graphs of a GPT with tied embedding and head, on four ranks."""

import pytest

from fsdp_compile import rewrite
from fsdp_compile.passes import analysis, metadata, ops
from fsdp_compile.passes.analysis import full_buffers
from tests.models import build

UNITS = ["tokens+positions", "blocks.0", "blocks.1"]
LAST = "tokens+positions"  # its tied weight is the head's


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def gpt_graphs(**options):
    model = build("gpt")
    return rewrite(model, *model.inputs(3, seed=0), world_size=4, **options)


def buckets(graph, is_kind):
    return [ops.argument(node, "bucket") for node in graph.nodes if is_kind(node)]


def test_the_forward_gathers_each_unit_once():
    graphs = gpt_graphs()
    assert buckets(graphs.forward.graph, ops.is_all_gather) == UNITS


@pytest.mark.parametrize(
    ("reshard", "gathered"),
    [
        (None, ["blocks.1", "blocks.0"]),
        (True, [LAST, "blocks.1", "blocks.0"]),
        (False, []),
        ({"blocks.1": False}, ["blocks.0"]),
    ],
)
def test_the_backward_gathers_again_what_the_forward_freed(reshard, gathered):
    graphs = gpt_graphs(reshard_after_forward=reshard)
    assert buckets(graphs.backward.graph, ops.is_all_gather) == gathered


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
def test_each_bucket_has_one_reduce_scatter_in_the_order_of_the_backward(lowering):
    graphs = gpt_graphs(collective_lowering=lowering)
    assert buckets(graphs.backward.graph, ops.is_reduction) == ["blocks.1", "blocks.0", LAST]
    assert buckets(graphs.forward.graph, ops.is_reduction) == []


@pytest.mark.parametrize("lowering", ["packed", "grouped"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_every_full_buffer_is_freed_or_kept_for_the_backward(lowering, prefetch):
    graphs = gpt_graphs(
        collective_lowering=lowering,
        forward_prefetch=prefetch,
        backward_prefetch=prefetch,
        reshard_after_forward={"blocks.0": False, LAST: True},
    )
    kept = set()
    for side in (graphs.forward, graphs.backward):
        position = analysis.positions(side.graph)
        for buffer in full_buffers(side.graph):
            end = analysis.last_use(buffer, position)
            if end.op == "output":
                kept |= {out.args[1] for out in analysis.aliases(buffer) if ops.is_parameter_out(out)}
            else:
                assert ops.is_call(end, ops.FREE), buffer
    taken = {metadata.kept_parameter(node) for node in analysis.inputs(graphs.backward.graph)} - {None}
    assert {marked.bucket for marked in taken} == {"blocks.0"}
    assert {marked.parameter for marked in taken} <= kept


def test_nothing_full_is_saved_for_the_backward():
    """Neither a parameter nor a transposed one: the shapes of this GPT's matrices are not those of activations."""
    graphs = gpt_graphs(reshard_after_forward=True)
    full = {tuple(parameter.shape) for parameter in build("gpt").parameters() if parameter.dim() == 2}
    full |= {shape[::-1] for shape in full}
    saved = {tuple(node.meta["val"].shape) for node in analysis.inputs(graphs.backward.graph)}
    assert not saved & full
    assert not any(metadata.kept_parameter(node) for node in analysis.inputs(graphs.backward.graph))


def test_no_more_than_two_units_are_full_at_a_time():
    """With distance 1, a unit's gather starts when the one before the last is freed; tied weights live on."""
    graphs = gpt_graphs(reshard_after_forward=True, collective_lowering="grouped")
    for side in (graphs.forward, graphs.backward):
        alive = set()
        for node in side.graph.nodes:
            if ops.is_all_gather(node):
                alive.add(ops.argument(node, "bucket"))
            elif ops.is_call(node, ops.FREE):
                gather = node.args[0].args[0]
                alive.discard(ops.argument(gather, "bucket"))
            assert len(alive - {LAST}) <= 2
