"""Parts of a model that are every rank's own, as experts are: they were sharded on a group of that rank alone."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision

from fsdp_compile import ConfigError, fsdp_compile
from fsdp_compile.compat import FullyShardedDataParallel as FSDP
from fsdp_compile.compat import fully_shard
from tests.distributed.training import CLOSE, STEPS, adamw, assert_close, full, hybrid_mesh
from tests.models import DEVICE
from tests.ranks import on_ranks


class Experts(nn.Module):
    """Shared layers around an expert, which is another on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(5, 5)

    def forward(self, x):
        return self.last(self.expert(self.first(x).relu()).relu())

    def shared(self):
        return [*self.first.parameters(), *self.last.parameters()]


def of_this_rank():
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def by_fsdp1(model, backend):
    FSDP(model.expert, of_this_rank(), backend=backend)
    FSDP(model.first, backend=backend)
    return FSDP(model, backend=backend)


def by_fsdp2(model, backend):
    alone = init_device_mesh(DEVICE.type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "own"))["own"]
    fully_shard(model.expert, mesh=alone, backend=backend)
    return fully_shard(model, backend=backend)


def batch(step):
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 6)


def train(model, reduce, clip):
    optimizer, losses = adamw(model.parameters()), []
    for step in STEPS:
        loss = model(batch(step)).square().mean()
        loss.backward()
        reduce()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), norm]
    return losses


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [by_fsdp1, by_fsdp2])
@on_ranks(2)
def test_every_rank_trains_its_own_expert_and_all_of_them_the_rest(world_size, make, backend):
    expected, model = Experts(), Experts()
    make(model, backend)

    def reduce():
        for parameter in expected.shared():
            dist.all_reduce(parameter.grad.div_(world_size))

    def clip():
        """By the norm over what is shared, once, and all experts."""
        squares = sum(parameter.grad.square().sum() for parameter in expected.expert.parameters())
        dist.all_reduce(squares)
        norm = (squares + sum(parameter.grad.square().sum() for parameter in expected.shared())).sqrt()
        for parameter in expected.parameters():
            parameter.grad.mul_((0.01 / (norm + 1e-6)).clamp(max=1))
        return norm

    wanted = train(expected, reduce, clip)
    assert_close(train(model, lambda: None, lambda: model.clip_grad_norm_(0.01)), wanted)
    for (name, parameter), (_, of_expected) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        torch.testing.assert_close(full(parameter), of_expected, **CLOSE, msg=name)


@on_ranks(2)
def test_an_own_part_keeps_its_precision(world_size):
    model = Experts()
    FSDP(model.expert, of_this_rank(), backend="aot_eager", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="process_group"):
        fsdp_compile(model, process_group=3)
    assert fsdp_compile(model, backend="aot_eager") is model
    assert model.expert(torch.ones(2, 5)).dtype == torch.bfloat16


@on_ranks(2)
def test_a_part_that_nobody_said_is_alone_is_refused(world_size):
    """It was sharded before there were other ranks: nothing would reduce its gradients."""
    model = Experts()
    with mock.patch.object(dist, "is_initialized", return_value=False):
        fsdp_compile(model.expert, backend="aot_eager")
    with pytest.raises(
        ConfigError, match=r"expert is sharded over the ranks None, and the model would be over \[0, 1\]"
    ):
        fsdp_compile(model, backend="aot_eager")


@on_ranks(4)
def test_own_parts_go_with_a_mesh_of_one_dimension(world_size):
    model = Experts()
    FSDP(model.expert, of_this_rank(), backend="aot_eager")
    with pytest.raises(ConfigError, match="expert is every rank's own"):
        fsdp_compile(model, hybrid_mesh(), backend="aot_eager")


@on_ranks(2)
def test_a_copy_and_one_from_a_file_have_every_ranks_own_part(world_size):
    model = by_fsdp1(Experts(), "aot_eager")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    wanted = train(model, lambda: None, lambda: model.clip_grad_norm_(0.01))
    for each in copies:
        assert_close(train(each, lambda: None, lambda each=each: each.clip_grad_norm_(0.01)), wanted)
        assert_close(dict(each.expert.named_parameters()), dict(model.expert.named_parameters()))
