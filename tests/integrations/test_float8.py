"""Float8 training by torchao, as its users write it: sharded, it is equal to the unsharded model."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from fsdp_compile import fsdp_compile, rewrite
from fsdp_compile.costs import HARDWARE, explain, predict
from fsdp_compile.passes import ops
from tests.distributed.training import full, hybrid_mesh, sgd
from tests.models import DEVICE, made, seeded
from tests.ranks import on_ranks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 48, bias=False), nn.LayerNorm(48), nn.Linear(48, 32)
        self.out = nn.Linear(32, 16)

    def forward(self, x):
        return self.out(torch.tanh(self.down(torch.tanh(self.norm(self.up(x)))))).square().mean()


def in_float8(recipe="tensorwise"):
    return convert_to_float8_training(made(Net), config=Float8LinearConfig.from_recipe_name(recipe))


LINEAR = {"auto_wrap_policy": {nn.Linear}}


def assert_trains_so(model, expected, *, is_equal, autocast=None):
    """Ranks have the same rows, so that scales of activations are those of the unsharded model, too."""
    optimizers = sgd(model.parameters()), sgd(expected.parameters())
    close = {"rtol": 0, "atol": 0 if is_equal else 1e-7}
    for step in range(3):
        x = torch.randn(16, 32, generator=seeded(step), device=DEVICE)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast is not None):
            losses = model(x), expected(x)
        torch.testing.assert_close(*losses, **close)
        for loss in losses:
            loss.backward()
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(full(found.grad), wanted.grad, **close)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast is not None):
        torch.testing.assert_close(model(x), expected(x), **close)


def sent(graph):
    """The dtypes of parameters, as they come out of gathers."""
    return {
        ops.argument(node, "parameter"): node.meta["val"].dtype for node in graph.nodes if ops.is_parameter_out(node)
    }


class InMicroscaling(nn.Module):
    """Blocks of 32 elements of a row share a scale, which is a power of two (OCP Microscaling Formats, 2023)."""

    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(32, 64), nn.Linear(32, 16)
        self.down = MXFP8Linear(64, 32, bias=False, kernel_preference=KernelPreference.EMULATED)

    def forward(self, x):
        x = x.repeat(2, 1)  # there are blocks of rows, too
        return self.out(torch.tanh(self.down(torch.tanh(self.up(x))))).square().mean()


RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
NARROW = {"up.weight": torch.float8_e4m3fn, "down.weight": torch.float8_e4m3fn}
OPTIONS = {
    "packed": {},
    "grouped": {"collective_lowering": "grouped"},
    "planned": {"hardware": "h100"},
    "one unit": {"auto_wrap_policy": [], "reshard_after_forward": True},
    "autocast": {},
}


@pytest.mark.parametrize("option", OPTIONS)
@on_ranks(2)
def test_weights_are_gathered_in_float8_and_no_bit_is_changed(world_size, option):
    model = fsdp_compile(in_float8(), backend="aot_eager", **{**LINEAR, **OPTIONS[option]})
    assert_trains_so(model, in_float8(), is_equal=True, autocast=option == "autocast" or None)
    found = sent(model.graphs[-1].forward.graph)
    assert option == "planned" or NARROW.items() <= found.items()


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(3)
def test_padding_is_no_maximum(world_size, recipe):
    """On three ranks, whose mean of three equal gradients is rounded."""
    assert_trains_so(fsdp_compile(in_float8(recipe), backend="aot_eager", **LINEAR), in_float8(recipe), is_equal=False)


@pytest.mark.parametrize("recipe", RECIPES[:2])
@on_ranks(4)
def test_with_generated_code_and_replicas(world_size, recipe):
    model = fsdp_compile(in_float8(recipe), hybrid_mesh(), backend="inductor", **LINEAR)
    assert_trains_so(model, in_float8(recipe), is_equal=False)
    for side in model.graphs[-1].sides:
        (first,) = [node for node in side.graph.nodes if ops.is_functional_collective(node)]
        assert ("all_reduce" if recipe == "tensorwise" else "all_gather") in str(first.target)
    assert NARROW.items() <= sent(model.graphs[-1].forward.graph).items()


@pytest.mark.parametrize("recipe", RECIPES[1:])
@on_ranks(2)
def test_scales_of_rows_and_columns(world_size, recipe):
    """The forward scales rows. So does the backward in one recipe, whose weight is transposed: these are columns."""
    model = fsdp_compile(in_float8(recipe), backend="aot_eager", **LINEAR)
    assert_trains_so(model, in_float8(recipe), is_equal=True)
    trained, _ = model.graphs
    assert NARROW.items() <= sent(trained.forward.graph).items()
    assert sent(trained.backward.graph)["down.weight"] == torch.float8_e4m3fn


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2)
def test_blocks_of_rows_in_the_forward(world_size, backend):
    """The backward has blocks of columns, which ranks have parts of: its weights are gathered as they are."""
    model, expected = fsdp_compile(made(InMicroscaling), backend=backend, **LINEAR), made(InMicroscaling)
    if backend == "inductor":
        expected.compile()
    assert_trains_so(model, expected, is_equal=backend == "aot_eager")
    trained, _ = model.graphs
    assert sent(trained.forward.graph)["down.weight"] == torch.float8_e4m3fn
    assert sent(trained.backward.graph)["down.weight"] == torch.float32


def test_a_gather_carries_a_quarter_and_what_is_kept_stays_wide():
    x, sizes = torch.randn(16, 32), {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        graphs = rewrite(
            in_float8(), x, world_size=4, sharding_strategy=strategy, collective_lowering="packed", **LINEAR
        )
        gathers = [node for node in graphs.forward.graph.nodes if ops.is_all_gather(node)]
        sizes[strategy] = {
            ops.argument(node, "bucket"): node.meta["val"].numel() * node.meta["val"].element_size() for node in gathers
        }
        assert predict(graphs, HARDWARE["h100"]).seconds > 0
        is_wide = strategy == ShardingStrategy.SHARD_GRAD_OP
        assert ("down.weight travels as float32" in str(explain([graphs]))) == is_wide
    wide, narrow = sizes[ShardingStrategy.SHARD_GRAD_OP], sizes[ShardingStrategy.FULL_SHARD]
    assert narrow["up"] == wide["up"] == 32 * 48  # which no backward reads
    bias = 4 * 32
    assert narrow["down"] == 32 * 48 + bias and wide["down"] == 4 * 32 * 48 + bias
