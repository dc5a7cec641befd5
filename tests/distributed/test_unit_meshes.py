"""Units on a mesh of their own: experts that are split over some of the ranks, and sharded over the others."""

import copy

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compile import ConfigError, NonFiniteError, fsdp_compile
from fsdp_compile.compat import fully_shard
from tests.distributed.test_at_hand import planning_by_default
from tests.distributed.training import CLOSE, STEPS, adamw
from tests.models import DEVICE
from tests.ranks import on_ranks

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
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
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


def sharded(*, as_dtensors=True, backend="aot_eager", **options):
    dense, efsdp, ep = meshes()
    model = Mixture()
    for layer in model.layers:
        layer.experts.split(ep, as_dtensors=as_dtensors)
        fsdp_compile(layer.experts, efsdp, backend=backend, gradient_reduction=dense.size())
    return fsdp_compile(model, dense, backend=backend, **options)


def sharded_as_by_torch(*, as_dtensors=True, backend="aot_eager"):
    dense, efsdp, ep = meshes()
    model = Mixture()
    for layer in model.layers:
        layer.experts.split(ep, as_dtensors=as_dtensors)
        fully_shard(layer.experts, mesh=efsdp, backend=backend)
        layer.experts.set_gradient_divide_factor(dense.size())
        fully_shard(layer, mesh=dense, backend=backend)
    return fully_shard(model, mesh=dense, backend=backend)


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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [sharded, sharded_as_by_torch])
@pytest.mark.parametrize("as_dtensors", [True, False], ids=["dtensors", "plain"])
@on_ranks(4)
def test_experts_on_a_mesh_of_their_own_train_as_the_whole_model(world_size, as_dtensors, make, backend):
    assert_trains_as_the_whole_model(make(as_dtensors=as_dtensors, backend=backend))
