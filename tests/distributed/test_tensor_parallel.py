"""Models whose parameters were distributed before they are sharded: tensor and sequence parallelism, on 2 x 2 ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fsdp_compile import ConfigError, NonFiniteError, fsdp_compile, shard
from fsdp_compile.compat import fully_shard
from tests.distributed.test_at_hand import planning_by_default
from tests.distributed.training import CLOSE, STEPS, adamw
from tests.models import DEVICE
from tests.ranks import on_ranks

WIDTH, SEQUENCE = 8, 4


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """Two blocks, and a head that no plan names: every rank computes it."""

    def __init__(self, hidden=12):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(hidden), Block(hidden)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def root_mesh():
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))


def by_tensor(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def by_sequence(model, mesh):
    """Activations between blocks are sharded along the sequence, and norms, which are replicated, see a part of it."""
    for index, block in enumerate(model.blocks):
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
        if index == 0:
            prepare = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            )
            parallelize_module(block, mesh, prepare)
    parallelize_module(model.head, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()))
    return model


BOTH_PLANS = pytest.mark.parametrize("parallelize", [by_tensor, by_sequence])


def batch(step):
    """Another for every rank of the dimension dp, the same along tp."""
    torch.manual_seed(100 * step + dist.get_rank() // 2)
    return torch.randn(2, SEQUENCE, WIDTH)


def train(model, clip, whole):
    """A few steps; of the whole model, gradients are averaged over the ranks here."""
    optimizer, losses, norms = adamw(model.parameters()), [], []
    for step in STEPS:
        loss = model(batch(step)).square().mean()
        loss.backward()
        if whole:
            for parameter in model.parameters():
                dist.all_reduce(
                    parameter.grad, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM
                )
                parameter.grad /= dist.get_world_size()
        norms.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms


def expected(hidden=12):
    model = Net(hidden)
    losses, norms = train(model, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5), whole=True)
    return model, losses, norms


def assert_trained_alike(model, losses, norms, wanted):
    unsharded, wanted_losses, wanted_norms = wanted
    torch.testing.assert_close(losses, wanted_losses, **CLOSE)
    torch.testing.assert_close(norms, wanted_norms, **CLOSE)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), dict(unsharded.named_parameters())[name], **CLOSE)


def clip(model):
    return model.clip_grad_norm_(0.5)


@BOTH_PLANS
@on_ranks(4)
def test_it_trains_as_the_whole_model(world_size, parallelize):
    root = root_mesh()
    model = fsdp_compile(parallelize(Net(), root["tp"]), root["dp"], fullgraph=True)
    assert_trained_alike(model, *train(model, clip, whole=False), expected())


@pytest.mark.parametrize(("parallelize", "backend"), [(by_sequence, "inductor"), (by_tensor, "aot_eager")])
@on_ranks(4)
def test_it_trains_in_pieces_as_the_whole_model(world_size, parallelize, backend):
    """Each rank has two tokens of a row in by_sequence: each is a piece."""
    root, options = root_mesh(), {"backend": backend, "fullgraph": True, "collective_pieces": 2}
    model = fsdp_compile(parallelize(Net(), root["tp"]), root["dp"], **options)
    assert_trained_alike(model, *train(model, clip, whole=False), expected())
    (graphs,) = model.graphs
    names = ("all_gather_into_tensor", "reduce_scatter_tensor") if parallelize is by_sequence else ("all_reduce",)
    for side in graphs.sides:
        sent = [node for node in side.graph.nodes if node.name.startswith(names)]
        assert len(sent) >= 2 * len(names) * len(model.blocks), side.title


@BOTH_PLANS
@on_ranks(4)
def test_it_is_planned_by_default_and_trains_as_the_whole_model(world_size, parallelize):
    root = root_mesh()
    with planning_by_default():
        model = fsdp_compile(parallelize(Net(), root["tp"]), root["dp"], backend="aot_eager", fullgraph=True)
        assert_trained_alike(model, *train(model, clip, whole=False), expected())
    (graphs,) = model.graphs
    assert graphs.plan is not None and "of the model itself" in str(model.explain())
    sums = [node for node in graphs.backward.graph.nodes if "all_reduce" in node.name]
    assert len(sums) == len(model.blocks)  # for gradients of activations, or for those of both parameters of a norm


@BOTH_PLANS
@on_ranks(4)
def test_units_from_the_bottom_up_and_in_eager(world_size, parallelize):
    root = root_mesh()
    model = parallelize(Net(), root["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=root["dp"], backend="aot_eager")
    fully_shard(model, mesh=root["dp"], backend="aot_eager")
    assert_trained_alike(model, *train(model, clip, whole=False), expected())
    model = shard(parallelize(Net(), root["tp"]), root["dp"])
    assert_trained_alike(model, *train(model, clip, whole=False), expected())


@pytest.mark.parametrize("hidden", [2, 6, 10])
@on_ranks(4)
def test_rows_that_the_ranks_do_not_divide(world_size, hidden):
    root = root_mesh()
    model = fsdp_compile(by_tensor(Net(hidden), root["tp"]), root["dp"], backend="aot_eager")
    assert_trained_alike(model, *train(model, clip, whole=False), expected(hidden))


@on_ranks(4)
def test_one_rank_to_shard_over(world_size):
    """All four ranks split the model: nothing is left to shard, and clipping still adds up."""
    root = init_device_mesh(DEVICE.type, (1, 4), mesh_dim_names=("dp", "tp"))
    model = fsdp_compile(by_tensor(Net(), root["tp"]), root["dp"], backend="aot_eager")
    torch.manual_seed(0)
    inputs = torch.randn(2, SEQUENCE, WIDTH)
    whole = Net()
    for each in (model, whole):
        each(inputs).square().mean().backward()
    norm = model.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1), **CLOSE)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(gradient, dict(whole.named_parameters())[name].grad, **CLOSE)


@on_ranks(4)
def test_what_users_hold(world_size):
    root = root_mesh()
    whole, model = Net(), by_tensor(Net(), root["tp"])
    fsdp_compile(model, backend="aot_eager")  # the other dimension of the mesh
    up, norm = model.blocks[0].up.weight, model.blocks[0].norm.weight
    assert up.device_mesh == root and up.shape == (12, WIDTH)
    assert up.placements[0].split_factor == 2 and up.placements[1] == Shard(0)
    assert model.blocks[0].down.weight.placements == (Shard(0), Shard(1))
    assert norm.device_mesh == root["dp"] and norm.placements == (Shard(0),)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.testing.assert_close(full, dict(whole.state_dict()), rtol=0, atol=0)
    other = {name: value + 1 for name, value in whole.state_dict().items()}
    model.load_state_dict(other)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), other[name], rtol=0, atol=0)
    with model.summon_full_params():
        seen = model.blocks[0].up.weight
        assert seen.device_mesh == root["tp"] and seen.placements == (Shard(0),)
        torch.testing.assert_close(seen.full_tensor(), other["blocks.0.up.weight"], rtol=0, atol=0)
        with torch.no_grad():
            seen.add_(1)
    torch.testing.assert_close(model.blocks[0].up.weight.full_tensor(), other["blocks.0.up.weight"] + 1, rtol=0, atol=0)
    model.unshard()
    assert model.blocks[0].up.weight.device_mesh == root["tp"]
    model.reshard()
    copied = copy.deepcopy(model)
    inputs = batch(0)
    torch.testing.assert_close(copied(inputs), model(inputs), rtol=0, atol=0)


@on_ranks(4)
def test_every_rank_gets_the_values_of_the_first(world_size):
    """What is distributed, from the first rank that has the same part; what is not, and buffers, from rank 0."""
    root = root_mesh()
    model = by_tensor(Net(), root["tp"])
    model.register_buffer("count", torch.ones(3))
    with torch.no_grad():
        for tensor in (*model.parameters(), model.count):
            tensor.add_(dist.get_rank())
    shard(model, root["dp"])
    expected = Net()
    for name, parameter in expected.named_parameters():
        rank = torch.zeros_like(parameter)  # whose value it is
        if name.endswith(("up.weight", "up.bias", "down.weight")):
            rank.chunk(2, dim=int(name.endswith("down.weight")))[1].fill_(1)
        torch.testing.assert_close(model.get_parameter(name).full_tensor(), parameter + rank)
    torch.testing.assert_close(model.count, torch.ones(3))


@on_ranks(4)
def test_a_gradient_that_is_not_finite_is_told_on_every_rank(world_size):
    root = root_mesh()
    model = fsdp_compile(by_tensor(Net(), root["tp"]), root["dp"], backend="aot_eager", check_gradients=True)
    with torch.no_grad():
        local = model.blocks[0].up.weight.to_local()
        if dist.get_rank() == 3:
            local[0, 0] = float("inf")
    with pytest.raises(NonFiniteError):
        model(batch(0)).square().mean().backward()


@on_ranks(4)
def test_what_cannot_be_is_refused_and_nothing_changed(world_size):
    root = root_mesh()
    model = by_tensor(Net(), root["tp"])
    before = dict(model.named_parameters())
    unrelated = init_device_mesh(DEVICE.type, (4,))
    with pytest.raises(ConfigError, match=r"blocks.0.up.weight is a DTensor already.*dimensions, with names, of one"):
        fsdp_compile(model, unrelated)
    with pytest.raises(ConfigError, match="'tp' is for ranks that split a model"):
        fsdp_compile(model, root["tp"])
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
