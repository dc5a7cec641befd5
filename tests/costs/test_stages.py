"""Steps of pipelines: the order of the calls, what they gather and reduce, what is held meanwhile."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B, _ComputationType

from fsdp_compile import rewrite
from fsdp_compile.costs import find_hardware, predict
from fsdp_compile.costs.stages import Call, Stage, StagedStep, orders
from fsdp_compile.costs.timeline import Timeline
from fsdp_compile.errors import ConfigError
from fsdp_compile.passes import ops
from tests.passes.tiny import rows, three_layers

H100 = find_hardware("h100")


@pytest.mark.parametrize("num_stages, num_micro_batches", [(2, 2), (4, 8), (3, 4)])
def test_the_order_of_calls_is_that_of_torch(num_stages, num_micro_batches):
    """Torch (2.13) counts the forwards of its last stage from 1 where it lists them, and runs them from 0."""
    schedule = Schedule1F1B.__new__(Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = num_stages, num_micro_batches
    expected = schedule._get_pipeline_order()
    for index, found in enumerate(orders(num_stages, 1, num_micro_batches)[:-1]):
        assert found == calls(expected[index])


@pytest.mark.parametrize("pp_size, stages_of_rank, num_micro_batches", [(2, 2, 4), (4, 3, 8), (4, 2, 10), (4, 2, 3)])
def test_the_order_of_interleaved_calls_is_that_of_torch(pp_size, stages_of_rank, num_micro_batches):
    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = (
        pp_size,
        stages_of_rank,
        num_micro_batches,
    )
    schedule.microbatches_per_round = num_micro_batches // max(1, num_micro_batches // pp_size)
    for pp_rank, found in enumerate(orders(pp_size, stages_of_rank, num_micro_batches)):
        assert found == calls(schedule._calculate_single_rank_operations(pp_rank))


def calls(actions):
    names = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}
    return [
        Call(action.stage_index, names[action.computation_type], action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type in names
    ]


def test_the_last_stage_computes_a_backward_after_each_forward():
    assert orders(2, 1, 2)[1] == [(1, "forward", 0), (1, "backward", 0), (1, "forward", 1), (1, "backward", 1)]


@dataclasses.dataclass
class Timed:
    """A stage whose calls take as long as they are said to."""

    forward: float
    backward: float
    received: int = 0
    prediction: Mock = dataclasses.field(default_factory=lambda: Mock(optimizer_seconds=5.0))

    def call(self, name, number, num_micro_batches):
        seconds = getattr(self, name)
        return Timeline([], {}, seconds, seconds)


FREE = dataclasses.replace(H100, collective_start=0.0, within_node=dataclasses.replace(H100.within_node, hop=0.0))
"""Where nothing is sent in no time."""


def test_equal_stages_idle_as_long_as_a_micro_batch_passes_the_others():
    """(P - 1) (forward + backward), as in "Efficient large-scale language model training" (Narayanan et al., 2021)."""
    step = StagedStep([Timed(1.0, 2.0)] * 4, FREE, 1, 8)
    assert step.idle == pytest.approx(3 * 3.0)
    assert step.seconds == pytest.approx(8 * 3.0 + 3 * 3.0 + 5.0)
    assert (step.lower_bound, step.binds) == (8 * 3.0 + 5.0, "compute")


@pytest.mark.parametrize("stages_of_rank", [2, 4])
def test_stages_of_which_each_rank_has_several_idle_for_a_part_of_that(stages_of_rank):
    """1/V of it, as in the same paper; the parts of a stage take 1/V of its time."""
    seconds = 1.0 / stages_of_rank, 2.0 / stages_of_rank
    stages = [Timed(*seconds, prediction=Mock(optimizer_seconds=5.0 / stages_of_rank))] * (4 * stages_of_rank)
    step = StagedStep(stages, FREE, 1, 8, stages_of_rank)
    assert step.idle == pytest.approx(3 * 3.0 / stages_of_rank)
    assert step.seconds == pytest.approx(8 * 3.0 + 3 * 3.0 / stages_of_rank + 5.0)


def test_the_slowest_stage_sets_the_pace():
    step = StagedStep([Timed(1.0, 2.0), Timed(2.0, 4.0)], FREE, 1, 6)
    assert step.seconds == pytest.approx(1.0 + 6 * 6.0 + 2.0 + 5.0)  # the first stage begins, and it ends
    assert step.lower_bound == 6 * 6.0 + 5.0


def test_what_is_sent_between_stages_takes_the_link_between_their_ranks():
    """A stage of a whole node is on another node than the next one."""
    stages, num_bytes = [Timed(1.0, 1.0, 0), Timed(1.0, 1.0, 10**9)], 10**9
    seconds = [StagedStep(stages, FREE, ranks, 2).seconds for ranks in (1, H100.ranks_per_node)]
    on_its_way = [seconds - (2 * 2.0 + 2.0 + 5.0) for seconds in seconds]
    within, between = H100.within_node, H100.between_nodes
    assert on_its_way[0] == pytest.approx(2 * num_bytes / within.bandwidth)
    assert on_its_way[1] == pytest.approx(2 * (num_bytes / between.bandwidth + between.hop))


def stage(strategy, received=0):
    rewritten = rewrite(three_layers(), rows(), world_size=8, sharding_strategy=strategy)
    return Stage(predict(rewritten, H100), received)


def num_collectives(found, number, num_micro_batches=4):
    """Gathers of the forward and of the backward of a micro-batch, and reductions."""
    calls = [found.call(name, number, num_micro_batches) for name in ("forward", "backward")]
    nodes = [[event.node for event in call.events] for call in calls]
    return *(sum(map(ops.is_all_gather, each)) for each in nodes), sum(map(ops.is_reduction, nodes[1]))


def test_full_parameters_that_stay_are_gathered_once_and_gradients_are_reduced_once():
    kept, resharded = stage(ShardingStrategy.SHARD_GRAD_OP), stage(ShardingStrategy.FULL_SHARD)
    assert [num_collectives(kept, number) for number in range(4)] == [(3, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 3)]
    (forward, backward, _), *others = [num_collectives(resharded, number) for number in range(4)]
    assert forward == 3 and backward > 0
    assert others == [(forward, backward, 0), (forward, backward, 0), (forward, backward, 3)]
    first, later = (kept.call("forward", number, 4) for number in (0, 1))
    assert later.exposed == {} and first.exposed and later.seconds < first.seconds


def test_a_stage_holds_what_its_micro_batches_save_and_the_gradients_of_those_before():
    found = stage(ShardingStrategy.SHARD_GRAD_OP, received=1000)
    alone, one, three = (found.peak(*numbers, handed_on=100) for numbers in ((1, 1), (4, 1), (4, 3)))
    assert alone.held["gathered"] == max(moment.held["gathered"] for moment in found.prediction.memory.moments)
    full = sum(parameter.numel() * 4 for parameter in three_layers().parameters())
    assert one.held["gradients"] - alone.held["gradients"] >= full
    saved = [moment.held["activations"] for moment in found.prediction.memory.moments if moment.side == "forward"][-1]
    assert three.total - one.total == 2 * (saved + 1000 + 100)


def test_a_rank_holds_what_all_its_stages_do():
    """Two stages of a rank hold as much as one of both, if nothing is under way but in one of them."""
    found = stage(ShardingStrategy.FULL_SHARD, received=1000)
    one, two = StagedStep([found], H100, 8, 1), StagedStep([found] * 2, H100, 8, 1, 2)
    resident = {name: one.peak.held[name] for name in ("shards", "optimizer", "inputs")}
    assert {name: two.peak.held[name] for name in resident} == {name: 2 * held for name, held in resident.items()}
    saved = [moment.held["activations"] for moment in found.prediction.memory.moments if moment.side == "forward"][-1]
    assert two.peak.held["activations"] == max(
        found.peak(1, 1, 0).held["activations"] + saved + 2 * 1000, found.peak(1, 1, 1000).held["activations"]
    )


def test_more_micro_batches_are_under_way_where_a_rank_has_several_stages():
    """On the first of P pp ranks, with V stages: P micro-batches, or V P + P - 1 parts of 1/V."""
    found = stage(ShardingStrategy.FULL_SHARD)
    step = StagedStep([found] * 8, H100, 8, 8, 2)
    counts = [sum(under_way) for _, under_way in step._under_way(0)]
    assert max(counts) == 2 * 4 + 4 - 1
    assert step.peak.held["activations"] > StagedStep([found] * 4, H100, 8, 8).peak.held["activations"]


def test_a_stage_without_a_loss_is_predicted_too():
    """What it returns has gradients, and so has what it takes."""
    layer = nn.Linear(8, 8)
    found = predict(rewrite(layer, torch.ones(4, 8, requires_grad=True), world_size=8), H100)
    matmuls = [node for node in found.graphs.backward.graph.nodes if "mm" in str(node.target)]
    assert len(matmuls) == 2  # of the weight, and of the input


def test_fewer_micro_batches_than_stages_are_refused():
    with pytest.raises(ConfigError, match="a pipeline of 4 stages needs as many micro-batches, and a step has 3"):
        StagedStep([Timed(1.0, 1.0)] * 4, H100, 1, 3)


def test_micro_batches_that_rounds_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="in 2 rounds of 2 or more, and a step has 5, which is no multiple of 2"):
        StagedStep([Timed(1.0, 1.0)] * 4, H100, 1, 5, 2)
