"""How a model comes to be sharded: ignored parameters, models on the meta device, offloading."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import ConfigError
from tests.distributed.training import (
    assert_close,
    assert_same_parameters,
    assert_trains_as,
    batch_of_rank,
    both_front_ends,
    compiled,
)
from tests.models import DEVICE, build
from tests.ranks import on_ranks


@both_front_ends
@on_ranks(2)
def test_ignored_parameters_are_left_alone(world_size, front_end):
    torch.manual_seed(dist.get_rank())  # what is ignored is not synchronised
    model = build("gpt", seed=dist.get_rank())
    ignored = [*model.blocks[0].parameters(), model.tokens.weight]
    values = [parameter.detach().clone() for parameter in ignored]
    front_end(model, ignored_params=ignored)
    held = dict(model.named_parameters())
    assert all(any(parameter is other for other in held.values()) for parameter in ignored)
    assert sum(isinstance(parameter, DTensor) for parameter in held.values()) == len(held) - len(ignored)
    model(*batch_of_rank(model, 0)).backward()
    gradients = [torch.empty_like(ignored[0]) for _ in range(world_size)]
    dist.all_gather(gradients, ignored[0].grad)
    assert not torch.equal(*gradients)  # every rank has its own
    assert all(map(torch.equal, [parameter.detach() for parameter in ignored], values))


@both_front_ends
@on_ranks(2)
def test_what_is_sharded_already_cannot_be_ignored(world_size, front_end):
    model = build("gpt")
    front_end(model.blocks[0])
    sharded = next(iter(model.blocks[0].parameters()))
    with pytest.raises(ConfigError, match=r"ignored_params holds blocks\.0\.[a-z_.]+, which is sharded already"):
        front_end(model, ignored_params=[sharded])
    front_end(model)
    assert next(iter(model.blocks[0].parameters())) is sharded


@on_ranks(2)
def test_ignored_parameters_may_have_any_dtype_and_device(world_size):
    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.arange(6).view(3, 2) % 2 == 0, requires_grad=False)
            self.scale = nn.Parameter(torch.full((3, 1), 0.5))
            self.spare = nn.Parameter(torch.empty(2, device="meta"))

        def forward(self, x):
            return (x @ (self.codes * self.scale).t()).sum()

    model, expected = Quantized(), Quantized()
    with pytest.raises(ConfigError, match="codes is bool.*pass it in ignored_params"):
        compiled(model)
    compiled(model, ignored_params=[model.codes, model.spare])
    x = torch.ones(2, 2)
    model(x).backward()
    expected(x).backward()
    assert_close(model.scale.grad.full_tensor(), expected.scale.grad)


class Layer(nn.Module):
    """Values that come from the shape: equal wherever they are made."""

    def __init__(self, device=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5, 5, device=device))
        self.bias = nn.Parameter(torch.empty(5, device=device, dtype=torch.float64))
        self.register_buffer("scale", torch.empty(1, device=device))
        if device is None:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        torch.linspace(-1, 1, 25, out=self.weight.view(-1))
        self.bias.fill_(0.5)
        self.scale.fill_(2.0)

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias.float()) * self.scale)


def layers(device=None):
    model = nn.Sequential(Layer(device), Layer(device), Layer(device))
    model[2].weight = model[0].weight
    return model


def initialise(module):
    module.to_empty(device=DEVICE, recurse=False)
    module.reset_parameters()


def initialise_by_rank(module):
    initialise(module)
    with torch.no_grad():
        module.weight.add_(dist.get_rank())
        module.scale.add_(dist.get_rank())


@pytest.mark.parametrize("init", [initialise, initialise_by_rank])
@both_front_ends
@on_ranks(2)
def test_param_init_fn_gives_a_model_on_the_meta_device_its_values(world_size, front_end, init):
    model, expected = layers("meta"), layers()
    front_end(model, param_init_fn=init)
    assert_same_parameters(model, expected)
    assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))
    assert model[2]._parameters["weight"] is model[0]._parameters["weight"]
    optimizers = [torch.optim.SGD(found.parameters(), lr=0.1) for found in (model, expected)]
    for found, optimizer in zip((model, expected), optimizers, strict=True):
        found(torch.ones(2, 5)).pow(2).mean().backward()
        optimizer.step()
    assert_same_parameters(model, expected)


@on_ranks(2)
def test_a_param_init_fn_that_leaves_something_out_is_named(world_size):
    with pytest.raises(ConfigError, match="param_init_fn left weight of a Layer on the meta device"):
        compiled(layers("meta"), param_init_fn=lambda module: None)
    with pytest.raises(ConfigError, match="param_init_fn is a function that takes a module"):
        compiled(layers("meta"), param_init_fn="zeros")


@pytest.mark.parametrize("options", [{}, {"offload_policy": CPUOffloadPolicy()}], ids=["plain", "offloaded"])
def test_param_init_fn_on_a_single_process(options):
    model = compiled(layers("meta"), param_init_fn=initialise, **options)
    assert_close(model(torch.ones(2, 5)), layers()(torch.ones(2, 5)))


@pytest.mark.parametrize(
    "policy", [CPUOffloadPolicy(), CPUOffload(offload_params=True), CPUOffload(), OffloadPolicy()], ids=repr
)
@both_front_ends
@on_ranks(2)
def test_offloading_without_an_accelerator_is_the_same_graph(world_size, front_end, policy):
    model = front_end(build("odd_mlp"), offload_policy=policy)
    assert_trains_as(model, build("odd_mlp"))
    if model.graphs:
        plain = compiled(build("odd_mlp"))
        plain(*batch_of_rank(plain, 0)).backward()
        assert str(model.graphs[0]) == str(plain.graphs[0])


@both_front_ends
@on_ranks(2)
def test_a_forward_without_values_says_where_they_come_from(world_size, front_end):
    with torch.device("meta"):
        model = front_end(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ConfigError, match=r"0\.weight is on the meta device .* param_init_fn, or call model.to_empty"):
        model(torch.ones(2, 4))
    model.to_empty(device=DEVICE)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert torch.equal(model(torch.ones(2, 4)), torch.full((2, 4), 5.0))


@pytest.mark.parametrize("is_planned", [False, True], ids=["offloaded", "planned"])
@on_ranks(2)
def test_the_meta_device_computes_nothing_the_cpu_does(world_size, is_planned):
    options = {"memory_budget": "1 GiB"} if is_planned else {"offload_policy": CPUOffloadPolicy()}
    model = compiled(layers("meta"), param_init_fn=initialise, **options)
    assert_close(model(torch.ones(2, 5)), layers()(torch.ones(2, 5)))
    if is_planned:
        assert model.graphs[0].plan is not None
    else:
        assert "move" not in str(model.graphs[0])
