"""Models of equal layers, which Inductor compiles once, train as the unsharded model in eager."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile
from fsdp_compile.passes.outline_blocks import OutlineBlocks
from tests.distributed.training import assert_trains_as
from tests.models import Block, Gpt
from tests.passes.tracing import copy_of
from tests.ranks import on_ranks


class Deep(Gpt):
    def __init__(self, num_layers=6, is_checkpointed=False):
        super().__init__()
        self.blocks = nn.ModuleList([Block(self.dim, num_heads=2) for _ in range(num_layers)])
        for block in self.blocks if is_checkpointed else ():
            block.forward = lambda x, block=block: checkpoint(Block.forward, block, x, use_reentrant=False)


def built(**options):
    torch.manual_seed(0)
    return Deep(**options)


def num_calls_of_blocks(gm):
    outlined = copy_of(gm)
    OutlineBlocks()(outlined)
    return len(outlined.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {"collective_lowering": "grouped", "forward_prefetch": 2, "backward_prefetch": 0}),
        ({"is_checkpointed": True}, {"collective_lowering": "packed"}),
    ],
    ids=["grouped", "packed"],
)
@on_ranks(2)
def test_training_of_equal_layers_equals_the_unsharded_model(world_size, model, options):
    compiled = fsdp_compile(built(**model), backend="inductor", **options)
    assert_trains_as(compiled, built(**model), range(4))
    lowered = compiled.graphs[0].lowered
    assert num_calls_of_blocks(lowered.forward) + num_calls_of_blocks(lowered.backward) > 1
