"""Whatever a module may do with its parameters, sharded it trains and evaluates as the unsharded module does."""

import collections
import copy
import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_compile import ConfigError, fsdp_compile, register_fsdp_forward_method, shard
from tests.distributed.test_modules import ReadsItsSibling, assert_trains_as
from tests.distributed.training import (
    assert_close,
    assert_same_gradients,
    backend_of,
    batch_of_rank,
    both_front_ends,
    compiled,
    first_rows,
    global_batch,
    torch_compiled,
)
from tests.models import ConvNet, GraphBreak, OddMlp, Regression, build, made
from tests.ranks import on_ranks

three_front_ends = pytest.mark.parametrize(
    "front_end", [compiled, shard, torch_compiled], ids=["compiled", "eager", "torch.compile"]
)


# Compiled in parts, and by whom


@on_ranks(2)
def test_blocks_compiled_one_by_one(world_size):
    expected, model = build("gpt"), shard(build("gpt"))
    for block in model.blocks:
        block.compile(backend=backend_of(model))
    assert_trains_as(model, expected, range(2))
    assert len(model.graphs) == 2


@on_ranks(2)
def test_models_of_one_class_do_not_share_what_was_compiled_for_one(world_size):
    """torch.compile shares code between models; a graph of ours hands gradients over to the shards of one."""
    for _ in range(2):
        assert_trains_as(torch.compile(shard(made(OddMlp)), backend="fsdp"), made(OddMlp), range(2))


@pytest.mark.parametrize("is_part", [False, True])
@on_ranks(2)
def test_torch_compile_captures_the_whole_of_a_model_or_of_its_part(world_size, is_part):
    expected, model = made(OddMlp), shard(made(OddMlp))
    torch._dynamo.reset()  # what failed to be captured before would not be tried again
    compiled = torch.compile(model.layers if is_part else model, backend=backend_of(model), fullgraph=True)
    if is_part:
        rows, _ = batch_of_rank(expected, 0)
        assert_close(compiled(rows), expected.layers(rows))
    else:
        assert_trains_as(compiled, expected, range(2))
    assert len(model.graphs) == 1


@pytest.mark.parametrize("is_part", [False, True])
@on_ranks(2)
def test_other_compilers_are_refused_where_gradients_would_be_lost(world_size, is_part):
    expected, model = made(OddMlp), shard(made(OddMlp))
    (model.layers if is_part else model).compile(backend="aot_eager")
    batch = first_rows(expected, 0)
    with pytest.raises(Exception, match='sharded, was traced .* torch.compile(.*, backend="fsdp")'):
        model(*batch)
    with torch.no_grad():
        assert_close(model(*batch), expected(*batch))


# What goes in and what comes out


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    details: dict


Pair = collections.namedtuple("Pair", "loss outputs")


class Output(collections.OrderedDict):
    """Keys are attributes as well, as in the outputs of the transformers library."""

    def __init__(self, **values):
        super().__init__(**values)
        vars(self).update(values)


class OddOutputs(OddMlp):
    def forward(self, batch, *rest, scale=1.0, name=None, options=(1, {"power": 2})):
        y = self.layers(batch["x"])
        loss = F.mse_loss(y.sum(1, keepdim=True), batch["more"][0]) * scale ** options[1]["power"]
        penalties = Pair(*[tensor.square().mean() * y.mean() for tensor in rest if tensor is not None])
        return Output(loss=loss, penalties=penalties, result=Result(y.sum(), {"y": [y], "name": name}), nothing=None)


@three_front_ends
@on_ranks(2)
def test_nested_inputs_and_outputs_of_any_class(world_size, front_end):
    expected, model = made(OddOutputs), front_end(made(OddOutputs))
    x, target = first_rows(expected, 0)
    arguments = [{"x": x, "more": [target, "text"]}, x, None, target]
    outputs = [network(*arguments, scale=2.0, name="a name") for network in (model, expected)]
    for output in outputs:
        assert type(output) is Output and list(output) == ["loss", "penalties", "result", "nothing"]
        assert type(output.penalties) is Pair and type(output.result) is Result
        assert output.nothing is None and output.result.details["name"] == "a name"
    assert_close(*[[output.loss, *output.penalties, output.result.details["y"]] for output in outputs])
    for output in outputs:
        (output["loss"] + output.penalties.outputs + output.result.loss).backward()
    assert_same_gradients(getattr(model, "_orig_mod", model), expected)


# Modes in any order


@pytest.mark.parametrize("kind", [ConvNet, GraphBreak])
@three_front_ends
@on_ranks(2)
def test_modes_in_any_order(world_size, front_end, kind):
    """Each of the three modes before and after each, in training and in evaluation, and gradients all along."""
    expected, model = made(kind), front_end(made(kind))
    modes = [torch.inference_mode, torch.enable_grad, torch.no_grad]
    order = [torch.inference_mode, *modes, *reversed(modes), torch.no_grad, torch.enable_grad]
    for step, mode in enumerate(order):
        model.train(step % 3 > 0), expected.train(step % 3 > 0)
        batch = first_rows(expected, step)
        with mode():
            losses = [network(*batch) for network in (model, expected)]
            assert_close(*[loss.clone() for loss in losses])
        if mode is torch.enable_grad:
            for loss in losses:
                loss.backward()
    assert_same_gradients(getattr(model, "_orig_mod", model), expected)
    model.train(), expected.train()
    assert_trains_as(model, expected)


# Exceptions


class Explosion(Exception):
    pass


class Explodes(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Explosion


class Fragile(Regression):
    """May raise between its layers: in the forward, or in the backward, where it breaks the graph in two."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x, target, where=None):
        x = torch.tanh(self.shared(x))
        if where == "forward":
            raise Explosion
        if where == "backward":
            x = explode_in_backward(x)
        return F.mse_loss(self.head(torch.tanh(self.shared(x))), target)


@torch.compiler.disable
def explode_in_backward(x):
    return Explodes.apply(x)


@pytest.mark.parametrize("where", ["forward", "backward", "hook"])
@both_front_ends
@on_ranks(2)
def test_an_exception_in_the_middle_of_a_step(world_size, front_end, where):
    """The next steps are those of the unsharded model that made the same ones."""
    expected, model = made(Fragile), front_end(made(Fragile))
    assert_trains_as(model, expected, range(1))
    for network in (model, expected):
        handle = network.shared.weight.register_hook(explode) if where == "hook" else None
        with pytest.raises(Explosion):
            network(*batch_of_rank(expected, 1), where).backward()
        if handle is not None:
            handle.remove()
        network.zero_grad()
    assert isinstance(model.shared.weight, DTensor)
    assert_trains_as(model, expected, range(2, 4))


def explode(gradient):
    raise Explosion


@both_front_ends
@on_ranks(2)
def test_gradients_from_before_an_exception_are_kept(world_size, front_end):
    expected, model = made(Fragile), front_end(made(Fragile))
    for network, batch in ((model, batch_of_rank), (expected, global_batch)):
        network(*batch(expected, 0)).backward()
        with pytest.raises(Explosion):
            network(*batch(expected, 1), "forward").backward()
        network(*batch(expected, 2)).backward()
    assert_same_gradients(model, expected)


# Methods other than forward


class Methods(Regression):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.reader = ReadsItsSibling(nn.Linear(5, 5))
        self.sibling = self.reader.sibling
        self.normalised = nn.Linear(5, 5)
        self.table = nn.Parameter(torch.randn(5, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor, target: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Mean square of the encoding and the target."""
        return F.mse_loss(self.head(self.encode(x)), target) * scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.normalised(self.reader(self.encoder(x))) @ self.table

    def iterate(self, x, target, steps=2):
        """Calls the model, compiled or not, as generating methods do."""
        return sum(self(x, target, scale=1.0 / (step + 1)) + self.table.sum() for step in range(steps))

    @property
    def width_of_table(self):
        return self.table.shape[1]


def assert_gradients_of(call, model, expected):
    """`call(model, x, target)` is a scalar, with the same value and gradients; on rows that all ranks share."""
    for network in (model, expected):
        network.zero_grad()
    x, target = first_rows(expected, 0)
    results = [call(network, x, target) for network in (model, expected)]
    assert_close(*[result.detach() for result in results])
    for result in results:
        result.backward()
    assert_same_gradients(model, expected)
    with torch.no_grad():
        assert_close(*[call(network, x, target) for network in (model, expected)])


@both_front_ends
@on_ranks(2)
def test_forward_called_as_a_method(world_size, front_end):
    expected, model = made(Methods), front_end(made(Methods))
    assert inspect.signature(model.forward) == inspect.signature(expected.forward)
    assert inspect.signature(type(model).forward) == inspect.signature(Methods.forward)
    assert model.forward.__doc__ == Methods.forward.__doc__
    assert_gradients_of(lambda network, *batch: network.forward(*batch, scale=2.0), model, expected)
    assert_trains_as(model, expected)


class MethodsAndHook(Methods):
    def __init__(self):
        super().__init__()
        nn.utils.weight_norm(self.normalised)


@both_front_ends
@on_ranks(2)
def test_parts_of_a_model_called_by_themselves(world_size, front_end):
    """A layer, a container, a module with a hook, one that reads the parameters of another."""
    expected, model = made(MethodsAndHook), front_end(made(MethodsAndHook))
    assert_trains_as(model, expected, range(1))
    for part in ("head", "encoder", "encoder.0", "normalised", "reader"):
        assert_gradients_of(
            lambda network, x, target, part=part: network.get_submodule(part)(x).square().mean(), model, expected
        )
    assert_gradients_of(  # and in the same step as the model itself
        lambda network, x, target: network(x, target) + network.head(network.encoder(x)).square().mean(),
        model,
        expected,
    )
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
    assert_trains_as(model, expected)


@both_front_ends
@on_ranks(2)
def test_a_part_called_by_itself_sees_parameters_that_were_replaced(world_size, front_end):
    expected, model = made(Methods), front_end(made(Methods))
    for network in (model, expected):
        state = {name: value + 1 for name, value in network.state_dict().items()}
        network.load_state_dict(state, assign=True)
    assert_gradients_of(lambda network, x, target: network.encoder(x).square().mean(), model, expected)


@both_front_ends
@on_ranks(2)
def test_registered_methods(world_size, front_end):
    model = front_end(made(Methods))
    for name in ("encode", "iterate"):
        register_fsdp_forward_method(model, name)
        assert inspect.signature(getattr(model, name)) == inspect.signature(getattr(made(Methods), name))
    for network in (copy.deepcopy(model), model):
        expected = made(Methods)
        assert_gradients_of(lambda network, x, target: network.encode(x).square().mean(), network, expected)
        assert_gradients_of(lambda network, *batch: network.iterate(*batch), network, expected)
        assert_trains_as(network, expected)


@on_ranks(2)
def test_registering_a_method_of_a_model_that_is_not_sharded_changes_nothing(world_size):
    model = made(Methods)
    register_fsdp_forward_method(model, "encode")
    assert type(model) is Methods and "encode" not in vars(model)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def decode(self, x):
        return x @ self.weight

    def forward(self, x):
        return x


class Whole(OddMlp):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part()])


def decode(model, x, target):
    return model.parts[0].decode(x).square().mean()


@both_front_ends
@on_ranks(2)
def test_a_registered_method_of_a_part(world_size, front_end):
    model = front_end(made(Whole))
    register_fsdp_forward_method(model.parts[0], "decode")
    for network in (copy.deepcopy(model), model):
        assert_gradients_of(decode, network, made(Whole))


@both_front_ends
@on_ranks(2)
def test_a_method_that_was_registered_before_the_model_was_sharded_around_it(world_size, front_end):
    expected, model = made(Whole), made(Whole)
    front_end(model.parts[0])
    register_fsdp_forward_method(model.parts[0], "decode")
    front_end(model)
    assert not hasattr(model.parts[0], "graphs")
    assert_gradients_of(decode, model, expected)
    assert_trains_as(model, expected)


@on_ranks(2)
def test_a_registered_method_of_what_torch_compile_returned(world_size):
    """As transformers' Trainer has it with torch_compile=True."""
    model, expected = fsdp_compile(made(Methods), backend="aot_eager"), made(Methods)
    compiled = torch.compile(model, backend="aot_eager")
    register_fsdp_forward_method(compiled, "encode")

    def encode(network, x, target):
        return (compiled if network is model else network).encode(x).square().mean()

    assert_gradients_of(encode, model, expected)
    assert_trains_as(compiled, expected)


@both_front_ends
@on_ranks(2)
def test_what_cannot_be_registered(world_size, front_end):
    for model in (made(Methods), front_end(made(Methods))):
        for name in ("decode", "table", "width_of_table"):
            with pytest.raises(ConfigError, match=f"Methods defines no method '{name}'"):
                register_fsdp_forward_method(model, name)
    with pytest.raises(ConfigError, match="module is an nn.Module, not str"):
        register_fsdp_forward_method("model", "encode")


# Listing parameters


class MovingAverage(Regression):
    """Its forward updates a copy of a part of it, without gradients, as in momentum contrast."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(5, 5)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.head = nn.Linear(5, 1)

    def forward(self, x, target, is_compiled=False):
        (self.update if is_compiled else self.update_as_it_is)()
        with torch.no_grad():
            key = self.key(x)
        return F.mse_loss(self.head(torch.tanh(self.query(x))), target) + F.mse_loss(self.query(x), key)

    @torch.no_grad()
    def update(self):
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.5).add_(query, alpha=0.5)

    update_as_it_is = torch.compiler.disable(update)


@both_front_ends
@on_ranks(2)
def test_a_forward_may_write_to_parameters_that_it_lists_without_gradients(world_size, front_end):
    assert_trains_as(front_end(made(MovingAverage)), made(MovingAverage))


@on_ranks(2)
def test_compiled_writes_to_parameters_that_the_forward_reads_are_refused(world_size):
    """The write would come after the read."""
    model = compiled(made(MovingAverage))
    with pytest.raises(ConfigError, match="forward writes to the parameter key.weight"):
        model(*batch_of_rank(model, 0), is_compiled=True)


class Freezes(OddMlp):
    """Changes the flags and the gradients of its parameters in its forward."""

    def forward(self, x, target):
        freeze(self.layers[0])
        self.layers[2].zero_grad()
        return super().forward(x, target)


@torch.compiler.disable
def freeze(module):
    module.requires_grad_(False)


@on_ranks(2)
def test_flags_and_gradients_changed_in_forward_are_those_of_the_parameters(world_size):
    expected, model = made(Freezes), shard(made(Freezes))
    for network in (model, expected):
        for parameter in network.parameters():
            parameter.grad = torch.ones_like(parameter)
        network(*first_rows(expected, 0)).backward()
    flags = [[parameter.requires_grad for parameter in network.parameters()] for network in (model, expected)]
    assert flags[0] == flags[1]
    assert_same_gradients(model, expected)


@both_front_ends
@on_ranks(2)
def test_parameters_are_listed_sharded_outside_of_forward(world_size, front_end):
    model = front_end(made(OddMlp))
    seen = []
    for layer in model.layers:
        layer.register_full_backward_hook(lambda *_: seen.extend(model.parameters()))
    model(*batch_of_rank(model, 0)).backward()
    for parameter in [*seen, *model.parameters(), *model.layers[0].parameters()]:
        assert isinstance(parameter, DTensor)
    assert len(seen) == 5 * len(list(model.parameters()))


@both_front_ends
@on_ranks(2)
def test_functional_call_with_other_values(world_size, front_end):
    expected, model, other = made(OddMlp), front_end(made(OddMlp)), build("odd_mlp", seed=1)
    full = dict(other.named_parameters())
    values = {
        name: distribute_tensor(full[name].detach(), parameter.device_mesh, parameter.placements).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    batch = global_batch(other, 0)
    torch.func.functional_call(model, values, batch).backward()
    other(*batch).backward()
    for name, value in values.items():
        assert_close(value.grad.full_tensor(), full[name].grad)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, name
    with pytest.raises(ConfigError, match="functional_call takes such DTensors"):
        torch.func.functional_call(model, {name: value.detach() for name, value in full.items()}, batch)
    with pytest.raises(ConfigError, match=r"in place of torch.func.grad, go backward and read \.grad"):
        torch.func.grad(lambda values: torch.func.functional_call(model, values, batch))(dict(model.named_parameters()))
    for network in (model, expected):
        network(*batch).backward()
    assert_same_gradients(model, expected)
