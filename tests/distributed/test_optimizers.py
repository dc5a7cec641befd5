"""Optimizers built before and after sharding, and gradient clipping."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fsdp_compile import ConfigError, shard
from tests.distributed.training import (
    STEPS,
    NoDTensors,
    adamw,
    assert_close,
    assert_same_parameters,
    backward_of_both,
    batch_of_rank,
    both_front_ends,
    compiled,
    full,
    full_gradients,
    global_batch,
    take_step,
    train,
    train_unsharded,
)
from tests.models import build
from tests.ranks import on_ranks


@both_front_ends
@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_the_model(world_size, front_end):
    expected, _ = train_unsharded("gpt", STEPS)
    model = build("gpt")
    optimizer = adamw(model.parameters())
    front_end(model)
    train(model, optimizer, STEPS)

    assert_same_parameters(model, expected)
    in_groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in in_groups] == [id(parameter) for parameter in model.parameters()]


@both_front_ends
@on_ranks(2)
def test_an_optimizer_with_state_raises_at_its_first_step_after_sharding(world_size, front_end):
    model = build("odd_mlp")
    optimizer = adamw(model.parameters())
    train(model, optimizer, [0])
    front_end(model)
    model(*batch_of_rank(model, 1)).backward()
    with pytest.raises((ConfigError, RuntimeError), match="build the optimizer after sharding"):
        optimizer.step()


@on_ranks(2)
def test_an_optimizer_of_another_model_is_left_alone(world_size):
    other, expected = build("odd_mlp"), build("odd_mlp")
    optimizer, expected_optimizer = adamw(other.parameters()), adamw(expected.parameters())
    train(other, optimizer, [0])
    train(expected, expected_optimizer, [0])
    shard(build("odd_mlp", seed=1))
    train(other, optimizer, [1])
    train(expected, expected_optimizer, [1])
    assert_same_parameters(other, expected)


def fallback(base):
    """A subclass, which might do anything, computes with DTensors."""
    return type(f"Own{base.__name__}", (base,), {})


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True, weight_decay=0.1),
    "adamw": adamw,
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3),
    "adadelta": torch.optim.Adadelta,
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-3),
    "asgd": torch.optim.ASGD,
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-3),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-3),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.5, centered=True),
    "own": lambda parameters: fallback(torch.optim.AdamW)(parameters, lr=1e-3),
}


def assert_same_state(state, expected):
    """Of a parameter: DTensors, unless they are numbers, with the same values."""
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert isinstance(state[key], DTensor) == (value is not None and bool(value.dim()))
        assert_close(full(state[key]), value)


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_optimizers_of_torch_train_as_without_sharding(world_size, name):
    expected, model = build("few_rows"), shard(build("few_rows"))
    expected_optimizer, optimizer = (OPTIMIZERS[name](found.parameters()) for found in (expected, model))
    train(expected, expected_optimizer, STEPS, batch=global_batch)
    train(model, optimizer, STEPS)

    assert_same_parameters(model, expected)
    for parameter, of_expected in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same_state(optimizer.state[parameter], expected_optimizer.state[of_expected])
    assert len(optimizer.state) == len(expected_optimizer.state)


def load_its_own_state(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def change_the_number_of_a_state(model, optimizer):
    number = list(optimizer.state.values())[1].get("step")
    if number is not None:
        number.add_(5)


def scale_a_state(model, optimizer):
    for name, value in list(optimizer.state.values())[1].items():
        if name != "step":
            optimizer.state[list(model.parameters())[1]][name] = value * 2


def scale_a_parameter(model, optimizer):
    with torch.no_grad():
        list(model.parameters())[0].mul_(0.5)


def replace_a_gradient(model, optimizer):
    parameter = list(model.parameters())[1]
    parameter.grad = parameter.grad * 2


def drop_a_gradient(model, optimizer):
    list(model.parameters())[1].grad = None


def move_and_come_back(model, optimizer):
    model.double().float()


CHANGES = [
    load_its_own_state,
    change_the_number_of_a_state,
    scale_a_state,
    scale_a_parameter,
    replace_a_gradient,
    drop_a_gradient,
    move_and_come_back,
]


@pytest.mark.parametrize("name", ["adamw", "adamw_fused", "momentum"])
@on_ranks(2)
def test_a_step_sees_what_has_changed_since_the_last_one(world_size, name):
    """Each change comes after steps that were alike, between a backward and the step, and steps follow it."""
    expected, model = build("few_rows"), shard(build("few_rows"))
    both = [(each, OPTIMIZERS[name](each.parameters())) for each in (expected, model)]
    for number, change in enumerate([None, None, *CHANGES, None]):
        for seed in (2 * number, 2 * number + 1):
            for each, optimizer in both:
                each(*(global_batch if each is expected else batch_of_rank)(each, seed)).backward()
                if change is not None and seed % 2:
                    change(each, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(model, expected)
        for parameter, of_expected in zip(model.parameters(), expected.parameters(), strict=True):
            assert_same_state(both[1][1].state[parameter], both[0][1].state[of_expected])


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(2)
def test_steps_compute_with_plain_tensors(world_size, name):
    model = compiled(build("few_rows"))
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, [0])  # states begin as DTensors
    model(*batch_of_rank(model, 1)).backward()
    with NoDTensors():
        optimizer.step()


class Calls(TorchDispatchMode):
    """Counts calls of each operator."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


class Stack(nn.Module):
    """Small layers, then two whose parts take 90,000 elements each: a run has at most 65,536."""

    def __init__(self):
        super().__init__()
        self.small = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        self.up, self.down = nn.Linear(8, 22_500, bias=False), nn.Linear(22_500, 8, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.small(x)))).square().mean()


@on_ranks(2)
def test_small_parameters_are_updated_as_one(world_size):
    torch.manual_seed(0)
    model = compiled(Stack(), auto_wrap_policy=[])  # one unit
    optimizer = adamw(model.parameters())
    for _ in range(2):  # in the first step states are new, in the second they lie next to each other
        model(torch.ones(2, 8)).backward()
        with Calls() as calls:
            optimizer.step()
        optimizer.zero_grad()
        assert calls.counts[torch.ops.aten.addcdiv_] == 3


@pytest.mark.parametrize(("name", "front_end"), [*((name, shard) for name in OPTIMIZERS), ("adamw", compiled)])
@on_ranks(2)
def test_parameters_of_a_run_part_and_meet_again(world_size, name, front_end):
    """One gets no gradient in one step, and another state of a user in another."""
    torch.manual_seed(0)
    expected = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = front_end(copy.deepcopy(expected), auto_wrap_policy=[])
    optimizers = [OPTIMIZERS[name](found.parameters()) for found in (expected, model)]
    for step in range(5):
        for found, optimizer in zip((expected, model), optimizers, strict=True):
            found(torch.linspace(-1, 1, 32).view(4, 8)).square().mean().backward()
            if step == 1:
                found[1].weight.grad = None
            if step == 3:
                for value in optimizer.state[found[2].bias].values():
                    if value is not None:
                        value.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, expected)
    for parameter, of_expected in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same_state(optimizers[1].state[parameter], optimizers[0].state[of_expected])


@on_ranks(2)
def test_hooks_after_a_step_see_its_states(world_size):
    model = compiled(build("odd_mlp"))
    optimizer, seen = OPTIMIZERS["momentum"](model.parameters()), []
    optimizer.register_step_post_hook(lambda *_: seen.append(len(optimizer.state)))
    train(model, optimizer, STEPS)
    assert seen == [len(list(model.parameters()))] * len(STEPS)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(2)
def test_gradients_of_another_placement_are_still_dtensors_in_a_step(world_size, name):
    expected, model = build("odd_mlp"), compiled(build("odd_mlp"))
    optimizers = [OPTIMIZERS[name](found.parameters()) for found in (expected, model)]
    for step in STEPS:
        backward_of_both(model, expected, step)
        for parameter in model.parameters():
            parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
        take_step(optimizers)
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(2)
def test_an_optimizer_is_saved_and_copied_as_any_other(world_size, name):
    model = compiled(build("odd_mlp"))
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, STEPS)
    assert optimizer.__getstate__().keys() == {"defaults", "state", "param_groups"}
    expected = copy.deepcopy(model)
    expected_optimizer = OPTIMIZERS[name](expected.parameters())
    # load_state_dict takes the tensors that it is given
    expected_optimizer.load_state_dict(tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict()))
    train(expected, expected_optimizer, [4, 5])
    train(model, optimizer, [4, 5])
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("name", ["adamw", "momentum"])
@on_ranks(2)
def test_a_step_that_raises_loses_nothing(world_size, name):
    """Of two groups the second raises: the first has been stepped, and its states are where they belong."""
    expected, model = build("odd_mlp"), compiled(build("odd_mlp"))
    optimizers = []
    for found in (expected, model):
        first, *others = found.parameters()
        optimizers.append(OPTIMIZERS[name]([{"params": [first]}, {"params": others}]))
    backward_of_both(model, expected)
    for optimizer in optimizers:
        rate, optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"], "much"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[1]["lr"] = rate
        optimizer.step()
    first, of_expected = next(model.parameters()), next(expected.parameters())
    assert_close(full(first), of_expected)
    assert_same_state(optimizers[1].state[first], optimizers[0].state[of_expected])


@on_ranks(2)
def test_a_compiled_step_trains_the_model(world_size):
    expected, _ = train_unsharded("odd_mlp", STEPS)
    model = compiled(build("odd_mlp"))
    optimizer = adamw(model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in STEPS:
        model(*batch_of_rank(model, number)).backward()
        step()
        optimizer.zero_grad()
    assert_same_parameters(model, expected)


@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "odd_parameters", "few_rows"])
@on_ranks(2, 4)
def test_clip_grad_norm_equals_the_unsharded_models(world_size, name):
    expected, model = build(name), shard(build(name))
    backward_of_both(model, expected)
    expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    assert expected_norm > 0.01
    assert_close(full(norm), expected_norm)
    for gradient, value in zip(full_gradients(model).values(), full_gradients(expected).values(), strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-4, atol=1e-7)


class PlainStates(torch.optim.Optimizer):
    """Moments in eight bits, in plain tensors: `make_state` is what 8-bit optimizers and Shampoo do, and mix."""

    make_state = staticmethod(lambda parameter: torch.zeros(parameter.shape, dtype=torch.int8))

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(moment=self.make_state(parameter), scale=torch.ones(()))
            moment = (state["moment"].float() * state["scale"]).lerp(parameter.grad, 0.1)
            state["scale"] = moment.abs().max() / 127
            state["moment"] = (moment / state["scale"]).round().to(torch.int8)
            parameter.sub_(moment, alpha=self.param_groups[0]["lr"])


class StatesLikeParameters(PlainStates):
    make_state = staticmethod(lambda parameter: torch.zeros_like(parameter, dtype=torch.int8))


UNSUITED = {
    "adafactor": (torch.optim.Adafactor, "torch.optim.Adafactor"),
    "adafactor_foreach": (lambda parameters: torch.optim.Adafactor(parameters, foreach=True), "Adafactor"),
    "lbfgs_of_uneven_rows": (torch.optim.LBFGS, "LBFGS"),
    "states_in_eight_bits": (PlainStates, "PlainStates"),
}


@pytest.mark.parametrize("name", UNSUITED)
@on_ranks(2)
def test_an_optimizer_that_cannot_train_dtensors_says_so(world_size, name):
    make, named = UNSUITED[name]
    model = shard(build("odd_mlp"))
    optimizer = make(model.parameters())

    def closure():
        loss = model(*batch_of_rank(model, 0))
        loss.backward()
        return loss.detach()

    for _ in range(2):  # the step of a class is replaced once
        with pytest.raises(RuntimeError, match=rf"{named} cannot train these sharded parameters: it .*; use torch"):
            optimizer.step(closure)


@on_ranks(2)
def test_adafactor_of_transformers_says_what_it_cannot_do(world_size):
    optimization = pytest.importorskip("transformers.optimization")
    model = shard(build("odd_mlp"))
    optimizer = optimization.Adafactor(model.parameters())
    model(*batch_of_rank(model, 0)).backward()
    with pytest.raises(RuntimeError, match="transformers.optimization.Adafactor cannot train these sharded parameters"):
        optimizer.step()


@on_ranks(2)
def test_states_like_parameters_train_in_eight_bits_as_without_sharding(world_size):
    expected, model = build("odd_mlp"), shard(build("odd_mlp"))
    train(expected, StatesLikeParameters(expected.parameters()), STEPS, batch=global_batch)
    optimizer = StatesLikeParameters(model.parameters())
    train(model, optimizer, STEPS)
    assert_same_parameters(model, expected)
    assert all(isinstance(state["moment"], DTensor) for state in optimizer.state.values())


@on_ranks(2)
def test_an_unsharded_model_has_the_errors_of_torch(world_size):
    shard(build("odd_mlp"))
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    torch.optim.Adafactor([parameter]).step()  # works

    class Failing(PlainStates):
        def step(self, closure=None):
            raise RuntimeError("got mixed torch.Tensor and DTensor")

    with pytest.raises(RuntimeError, match="^got mixed"):
        Failing([parameter]).step()
