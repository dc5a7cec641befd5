"""Units on a mesh of their own: experts that are split over some of the ranks, and sharded over the others."""

import copy
import dataclasses
import io
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_compile import ConfigError, NonFiniteError, fsdp_compile
from fsdp_compile.compat import fully_shard
from tests.distributed.test_at_hand import planning_by_default
from tests.distributed.training import CLOSE, STEPS, adamw
from tests.models import DEVICE
from tests.ranks import on_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import mixture

WIDTH, HIDDEN, EXPERTS, TOKENS = 6, 5, 4, 7


class Experts(nn.Module):
    """As many matrices as experts; tokens are sorted by expert. Without a mesh this rank has all experts."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 3)
        self.mesh = None

    def split(self, mesh, *, as_dtensors):
        """Over the ranks of a mesh, each of which keeps some of the experts."""
        self.mesh = mesh
        for name, parameter in [*self.named_parameters()]:
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(self, name, nn.Parameter(part if as_dtensors else part.to_local().clone()))
        return self

    def forward(self, tokens, num_of_expert):
        if self.mesh is None:
            return self.compute(tokens, num_of_expert.tolist())
        group, size = self.mesh.get_group(), self.mesh.size()
        received = all_to_all_single(num_of_expert, None, None, group).view(size, -1)
        sent = num_of_expert.view(size, -1).sum(1).tolist()
        got = received.sum(1).tolist()
        for number in (*sent, *got):
            torch._check(number >= 0)
        arrived = all_to_all_single_autograd(tokens, got, sent, group)
        expert = torch.arange(received.numel(), device=tokens.device) % received.shape[1]
        order = torch.argsort(expert.repeat_interleave(received.flatten(), output_size=arrived.shape[0]), stable=True)
        computed = self.compute(arrived[order], received.sum(0).tolist())
        return all_to_all_single_autograd(computed[torch.argsort(order)], sent, got, group)

    def compute(self, tokens, nums):
        up, down = (each.to_local() if isinstance(each, DTensor) else each for each in (self.up, self.down))
        for num in nums:
            torch._check(num >= 0)
        parts = torch.split(tokens, nums)
        return torch.cat([(part @ up[i]).relu() @ down[i] for i, part in enumerate(parts)])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        tokens = self.norm(x)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        num_of_expert = F.one_hot(expert, EXPERTS).sum(0)
        computed = self.experts(tokens[order], num_of_expert)[torch.argsort(order)]
        return x + computed * weight[:, None]


class Mixture(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def meshes():
    """All four ranks to shard the rest over; two to shard experts over, and two to split them over."""
    both = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    return init_device_mesh(DEVICE.type, (4,), mesh_dim_names=("dp",)), both["efsdp"], both["ep"]


def split(as_dtensors, **sizes):
    """A mixture whose experts are split, the mesh to shard the rest of it over, and that for experts."""
    dense, efsdp, ep = meshes()
    model = Mixture(**sizes)
    for layer in model.layers:
        layer.experts.split(ep, as_dtensors=as_dtensors)
    return model, dense, efsdp


def sharded(*, as_dtensors=True, backend="aot_eager", **options):
    model, dense, efsdp = split(as_dtensors)
    for layer in model.layers:
        fsdp_compile(layer.experts, efsdp, backend=backend, gradient_reduction=dense.size())
    return fsdp_compile(model, dense, backend=backend, **options)


def sharded_as_by_torch(*, as_dtensors=True, backend="aot_eager"):
    model, dense, efsdp = split(as_dtensors)
    for layer in model.layers:
        fully_shard(layer.experts, mesh=efsdp, backend=backend)
        layer.experts.set_gradient_divide_factor(dense.size())
        fully_shard(layer, mesh=dense, backend=backend)
    return fully_shard(model, mesh=dense, backend=backend)


def sharded_by_a_map(*, num_layers=2, as_dtensors=True, backend="aot_eager", **options):
    model, dense, efsdp = split(as_dtensors, num_layers=num_layers)
    return fsdp_compile(model, {"": dense, "*.experts": efsdp}, backend=backend, **options)


def sharded_by_placements(*, as_dtensors=True, backend="aot_eager"):
    """By torch's ShardPlacementResult, whose meshes have means of their own."""
    model, dense, efsdp = split(as_dtensors)
    experts = {parameter for layer in model.layers for parameter in layer.experts.parameters()}

    def place(parameter):
        return ShardPlacementResult(None, FSDPMeshInfo(efsdp, 0)) if parameter in experts else None

    fully_shard(model, mesh=dense, shard_placement_fn=place, backend=backend)
    model.set_gradient_divide_factor(dense.size())
    return model


def batch(step):
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(TOKENS, 3)


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def train(model, clip):
    """A few steps. Of the whole model, gradients are averaged over the ranks here."""
    optimizer, results = adamw(model.parameters()), []
    for step in STEPS:
        loss = model(batch(step)).square().mean()
        loss.backward()
        results += [loss.detach(), clip(model)]
        optimizer.step()
        optimizer.zero_grad()
    return results


def clip_whole(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_sharded(model):
    return model.clip_grad_norm_(0.1)


def whole_experts(name, value):
    """All experts, where ranks keep plain parameters of their own."""
    if "experts" not in name or value.shape[0] == EXPERTS:
        return value
    ep = meshes()[2]
    return DTensor.from_local(value, ep, [Shard(0)]).full_tensor()


def assert_trains_as_the_whole_model(model):
    expected = Mixture()
    wanted = train(expected, clip_whole)
    torch.testing.assert_close(train(model, clip_sharded), wanted, **CLOSE)
    for (name, parameter), value in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(whole_experts(name, parameter.full_tensor()), value, **CLOSE, msg=name)


@pytest.mark.parametrize("make", [sharded, sharded_as_by_torch, sharded_by_a_map, sharded_by_placements])
@on_ranks(4)
def test_experts_on_a_mesh_of_their_own_train_as_the_whole_model(world_size, make):
    assert_trains_as_the_whole_model(make())


@on_ranks(4)
def test_a_mixture_that_exchanges_equal_parts(world_size):
    """That of the example, with room for all tokens; its attention computes alike on all ranks."""
    config = dataclasses.replace(mixture.SMALL, capacity=mixture.SMALL.experts / mixture.SMALL.active)
    torch.manual_seed(0)
    expected = mixture.Decoder(config)
    root = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = mixture.parallelize(copy.deepcopy(expected), root)
    model = fsdp_compile(model, {"": root._flatten("dp"), "*.experts": root["efsdp"]}, backend="aot_eager")
    optimizers = adamw(model.parameters()), adamw(expected.parameters())
    for step in STEPS:
        torch.manual_seed(step)
        tokens, targets = torch.randint(config.vocab, (2, world_size, 1, 8))
        losses = model(tokens[dist.get_rank()], targets[dist.get_rank()]), expected(tokens[:, 0], targets[:, 0])
        for loss in losses:
            loss.backward()
        mean = losses[0].detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / world_size, losses[1].detach(), **CLOSE)
        for (name, parameter), value in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), value.grad, **CLOSE, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_experts_that_are_plain_tensors(world_size):
    """Nothing says that they are others on every rank but the mesh that they are sharded over."""
    assert_trains_as_the_whole_model(sharded_as_by_torch(as_dtensors=False))


@on_ranks(4)
def test_compiled_by_inductor(world_size):
    assert_trains_as_the_whole_model(sharded_by_a_map(as_dtensors=False, backend="inductor"))


@on_ranks(4)
def test_planned_by_default(world_size):
    with planning_by_default() as (_, searched):
        model = sharded_by_a_map(fullgraph=True)
        assert_trains_as_the_whole_model(model)
    assert searched.call_count == (dist.get_rank() == 0)
    assert "of the model itself" in str(model.explain())


@on_ranks(4)
def test_one_all_reduce_clips_over_both_meshes(world_size):
    model = sharded_by_a_map()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        model(batch(0)).square().mean().backward()
    with CommDebugMode() as debug:
        model.clip_grad_norm_(0.1)
    assert debug.get_total_counts() == 1


@on_ranks(4)
def test_checkpoints_move_between_meshes(world_size):
    """From experts on a mesh of their own to a whole model, and to all on one mesh."""
    whole, model = Mixture(), sharded_by_a_map()
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.testing.assert_close(state, dict(whole.state_dict()), rtol=0, atol=0)
    other = {name: value + 1 for name, value in whole.state_dict().items()}
    one_mesh = fsdp_compile(Mixture(), backend="aot_eager")
    for each in (model, one_mesh):
        set_model_state_dict(each, dict(other), options=options)
        for name, parameter in each.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), other[name], rtol=0, atol=0, msg=name)


@on_ranks(4)
def test_copies_and_accumulated_gradients(world_size):
    model = sharded_by_a_map(num_layers=1)
    copied = copy.deepcopy(model)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for step in range(2):
            (model(batch(step)).square().mean() / 2).backward()
        with copied.no_sync():
            (copied(batch(0)).square().mean() / 2).backward()
        (copied(batch(1)).square().mean() / 2).backward()
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor(), **CLOSE)
    with pytest.raises(ConfigError, match="besides the mesh that it is sharded over cannot be pickled"):
        torch.save(model, io.BytesIO())


@on_ranks(4)
def test_a_gradient_of_an_expert_that_is_not_finite_is_told_on_every_rank(world_size):
    model = sharded_by_a_map(num_layers=1, check_gradients=True)
    with torch.no_grad():
        if dist.get_rank() % 2:  # half of the experts
            model.layers[0].experts.up.to_local().fill_(float("inf"))
    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(NonFiniteError, match="layers.0.experts.up"),
    ):
        model(batch(0)).square().mean().backward()


@on_ranks(4)
def test_experts_of_which_every_rank_has_one(world_size):
    """There is nothing left to shard them over: they are every rank's own."""
    both = init_device_mesh(DEVICE.type, (1, 4), mesh_dim_names=("efsdp", "ep"))
    model = Mixture()
    for layer in model.layers:
        layer.experts.split(both["ep"], as_dtensors=True)
    dense = init_device_mesh(DEVICE.type, (4,), mesh_dim_names=("dp",))
    model = fsdp_compile(model, {"": dense, "*.experts": both["efsdp"]}, backend="aot_eager")
    assert_trains_as_the_whole_model(model)


@on_ranks(4)
def test_what_cannot_be_is_refused_and_nothing_changed(world_size):
    dense, efsdp, ep = meshes()
    model = Mixture()
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match="no module of the model matches 'expert'"):
        fsdp_compile(model, {"": dense, "expert": efsdp})
    with pytest.raises(ConfigError, match="a map goes from globs over module names to DeviceMeshes"):
        fsdp_compile(model, {"": dense, "*.experts": 2})
    with pytest.raises(ConfigError, match=r"layers.0.experts.up is sharded over the ranks \[\d, \d\], and the model"):
        fsdp_compile(model, {"": ep, "*.experts": efsdp})
    with pytest.raises(ConfigError, match=r"the unit layers.0.experts cannot stay with 2 ranks, because layers.0.exp"):
        fsdp_compile(model, {"": dense, "*.experts": efsdp}, auto_wrap_policy=["*.experts"], reshard_after_forward=2)
    with pytest.raises(ConfigError, match="'auto' is for a model on one mesh"):
        fsdp_compile(model, {"": dense, "*.experts": efsdp}, sharding_strategy="auto", example_inputs=torch.ones(2, 3))
    assert all(one is other for one, other in zip(model.parameters(), before.values(), strict=True))
