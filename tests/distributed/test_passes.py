"""Passes of users: in the pipeline, verified, printed, and trained with."""

import dataclasses

import pytest
from torch import nn

from fsdp_compile import ConfigError, fsdp_compile, rewrite
from fsdp_compile.passes import analysis, ops
from fsdp_compile.passes.errors import VerifyError
from tests.distributed.training import assert_trains_as, sgd
from tests.models import build
from tests.passes.tiny import rows, three_layers
from tests.ranks import on_ranks


@dataclasses.dataclass(frozen=True)
class GatherAtOnce:
    """Start every all-gather at the beginning."""

    def __call__(self, gm):
        position = analysis.positions(gm.graph)
        kinds = {node: 0 if node.op == "placeholder" else 1 if ops.is_all_gather(node) else 2 for node in position}
        analysis.reorder(gm.graph, {node: (kinds[node], place) for node, place in position.items()})


@dataclasses.dataclass(frozen=True)
class FreeEarly:
    """A pass with a defect: the first buffer is freed where it has just arrived."""

    def __call__(self, gm):
        free = next((node for node in gm.graph.nodes if ops.is_call(node, ops.FREE)), None)
        if free is not None:
            free.args[0].append(free)


def first_calls(graph, num):
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return ["gather" if ops.is_all_gather(node) else str(node.target) for node in calls[:num]]


def test_a_pass_of_the_user_is_in_the_printed_graph():
    graphs = rewrite(three_layers(), rows(), world_size=2, auto_wrap_policy=nn.Linear, passes=[GatherAtOnce()])
    assert first_calls(graphs.forward, 4) == ["gather"] * 3 + ["fsdp.wait.default"]
    lines = str(graphs.forward).splitlines()[1:4]
    assert all("fsdp.all_gather(" in line for line in lines)


@on_ranks(2)
def test_a_model_with_a_pass_of_the_user_trains_as_without(world_size):
    for backend in ("aot_eager", "inductor"):
        options = {"auto_wrap_policy": {nn.Linear}, "passes": [GatherAtOnce()]}
        model = fsdp_compile(build("odd_mlp"), backend=backend, **options)
        assert_trains_as(model, build("odd_mlp"), range(3), sgd)
        assert first_calls(model.graphs[0].forward, 4) == ["gather"] * 3 + ["fsdp.wait.default"]


def test_a_defect_of_a_pass_is_found_and_the_error_names_it():
    with pytest.raises(VerifyError) as caught:
        rewrite(three_layers(), rows(), world_size=2, passes=[FreeEarly()])
    assert "while running FreeEarly() on the forward graph" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("passes", [GatherAtOnce(), [GatherAtOnce], [len], [None], "abc"])
def test_what_is_no_list_of_passes_is_refused(passes):
    with pytest.raises(ConfigError, match="passes is a list|a pass is an object of a dataclass"):
        rewrite(three_layers(), rows(), world_size=2, passes=passes)
