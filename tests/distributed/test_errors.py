"""What is refused, with which words; the model is untouched afterwards.

One process: the "fake" process group has the ranks of a large job and sends nothing.
"""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_compile import ConfigError, fsdp_compile, shard
from tests.models import Block, build

front_ends = pytest.mark.parametrize("front_end", [fsdp_compile, shard])


@pytest.fixture(autouse=True)
def two_ranks():
    torch._dynamo.reset()
    join_fake_group(world_size=2)
    yield
    dist.destroy_process_group()


def join_fake_group(world_size, backend="fake"):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=world_size)


@contextlib.contextmanager
def untouched(model, *inputs):
    """After the block the model has the same objects, classes and hooks, and computes the same."""
    before, expected = everything_of(model), model(*inputs)
    yield
    assert everything_of(model) == before
    assert torch.equal(model(*inputs), expected)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter, name


def everything_of(model):
    modules = {name: (id(module), type(module)) for name, module in model.named_modules()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    buffers = {name: id(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    hooks = {name: hooks_of(module) for name, module in model.named_modules()}
    return modules, parameters, buffers, attributes, hooks


def hooks_of(module):
    return {name: list(value.values()) for name, value in vars(module).items() if "hooks" in name and value}


@contextlib.contextmanager
def refused(words, error=ConfigError):
    """The model of the test is refused, with a message that contains all the words."""
    with pytest.raises(error) as caught:
        yield
    for word in words.split():
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def refuses(model, words, front_end=fsdp_compile, error=ConfigError, **options):
    inputs = model.inputs(4, seed=0)
    with untouched(model, *inputs), refused(words, error):
        front_end(model, **options)


# Models


@front_ends
def test_an_integer_parameter_that_requires_sharding(front_end):
    model = build("odd_mlp")
    model.layers[2].table = nn.Parameter(torch.zeros(6, dtype=torch.int8), requires_grad=False)
    refuses(model, "layers.2.table int8 floating", front_end)


@front_ends
def test_a_model_without_a_backend_for_its_device(front_end):
    join_fake_group(world_size=2, backend="cuda:fake")
    refuses(build("odd_mlp"), "cpu backend", front_end)


def test_parameters_on_two_devices():
    model = build("odd_mlp")
    model.layers[0].to("meta")
    before = everything_of(model)
    with refused("cpu meta"):
        fsdp_compile(model)
    assert everything_of(model) == before


@pytest.mark.parametrize("first", [fsdp_compile, shard])
@pytest.mark.parametrize("second", [fsdp_compile, shard])
def test_a_model_that_is_sharded_already(first, second):
    model = first(build("odd_mlp"))
    before = everything_of(model)
    with refused("already sharded"):
        second(model)
    assert everything_of(model) == before


def test_something_that_is_no_module():
    with pytest.raises((ConfigError, TypeError), match="Module"):
        fsdp_compile(lambda x: x)


@pytest.mark.parametrize("call_first", [False, True])
def test_the_backend_on_a_model_that_was_never_sharded(call_first):
    model = build("odd_mlp")
    inputs = model.inputs(4, seed=0)
    if call_first:  # another model is sharded: it lends this one nothing
        shard(build("odd_mlp"))
    compiled = torch.compile(model, backend="fsdp")
    with untouched(model, *inputs), pytest.raises(Exception, match="shard") as caught:
        compiled(*inputs)
    error = caught.value  # Dynamo wraps what a backend raises
    assert isinstance(getattr(error, "inner_exception", error), ConfigError), repr(error)


# Meshes and groups


@front_ends
def test_a_mesh_of_three_dimensions(front_end):
    join_fake_group(world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    refuses(build("odd_mlp"), "mesh 3", front_end, mesh=mesh)


@front_ends
@pytest.mark.parametrize("names", [("dp", "tp"), ("pp", "dp"), ("tp",)])
def test_a_mesh_with_a_dimension_that_splits_models(front_end, names):
    join_fake_group(world_size=4)
    mesh = init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)
    refuses(build("odd_mlp"), "tp" if "tp" in names else "pp", front_end, mesh=mesh)


def test_a_mesh_together_with_a_process_group():
    mesh = init_device_mesh("cpu", (2,))
    refuses(build("odd_mlp"), "mesh process_group", mesh=mesh, process_group=dist.group.WORLD)


def test_something_that_is_no_mesh():
    refuses(build("odd_mlp"), "mesh", error=(ConfigError, TypeError), mesh="cpu")


# Policies


def says_yes(module, recurse, nonwrapped_numel):
    return "yes"


@front_ends
def test_a_callable_that_returns_no_bool(front_end):
    refuses(build("gpt"), "yes bool", front_end, auto_wrap_policy=says_yes)


@front_ends
def test_a_custom_policy_that_returns_no_bool(front_end):
    policy = CustomPolicy(lambda module: "yes")
    refuses(build("gpt"), "yes", front_end, auto_wrap_policy=policy)


def test_a_policy_that_raises_leaves_the_model_alone():
    def policy(module, recurse, nonwrapped_numel):
        raise KeyError("my own")

    refuses(build("gpt"), "my own", auto_wrap_policy=policy, error=KeyError)


POLICIES_WITHOUT_A_MEANING = {
    "a number": (3, "auto_wrap_policy"),
    "a glob without a match": (["encoder.*"], "auto_wrap_policy encoder.*"),
    "a class the model has not": ([nn.LSTM], "auto_wrap_policy LSTM"),
    "a module of another model": ([nn.Linear(2, 2)], "auto_wrap_policy Linear"),
    "a list of numbers": ([1, 2], "auto_wrap_policy"),
}


@pytest.mark.parametrize("policy", list(POLICIES_WITHOUT_A_MEANING))
def test_a_policy_without_a_meaning(policy):
    value, words = POLICIES_WITHOUT_A_MEANING[policy]
    refuses(build("gpt"), words, auto_wrap_policy=value)


# Options

WRONG_VALUES = {
    "reshard_after_forward": ["sometimes", 3, -1, {"blocks.0": "yes"}, {"encoder.*": False}],
    "forward_prefetch": [-1, "far", 1.5],
    "backward_prefetch": [-1, "far", 1.5],
    "collective_lowering": ["fast", None],
    "gradient_reduction": ["median", None],
    "sharding_strategy": ["auto", 1, None],
    "mp_policy": [torch.bfloat16, {"encoder.*": MixedPrecisionPolicy()}],
    "offload_policy": ["cpu", True],
    "ignored_params": ["weight", [torch.ones(2)]],
    "param_init_fn": ["zeros"],
    "sync_module_states": ["yes", None],
    "memory_budget": [0, "much", 1.5],
    "hardware": ["k80", 5],
}
WRONG_COMPILE_VALUES = {"backend": ["no_such_backend", None], "fullgraph": ["yes"], "dynamic": ["yes"]}


def each(values_of_option):
    return [
        pytest.param(option, value, id=f"{option}={value!r:.20}")
        for option, values in values_of_option.items()
        for value in values
    ]


@front_ends
@pytest.mark.parametrize(("option", "value"), each(WRONG_VALUES))
def test_a_value_that_an_option_cannot_have(front_end, option, value):
    refuses(build("gpt"), option, front_end, **{option: value})


@pytest.mark.parametrize(("option", "value"), each(WRONG_COMPILE_VALUES))
def test_a_value_that_the_compiler_cannot_have(option, value):
    refuses(build("gpt"), option, **{option: value})


def test_an_option_of_the_compiler_that_it_does_not_know():
    refuses(build("gpt"), "no_such_option", options={"no_such_option": True}, error=(ConfigError, RuntimeError))


@front_ends
@pytest.mark.parametrize("option", ["reshard", "use_orig_params", "device_id"])
def test_an_unknown_option(front_end, option):
    refuses(build("gpt"), option, front_end, error=(ConfigError, TypeError), **{option: True})


@pytest.mark.parametrize("option", ["backend", "fullgraph", "dynamic"])
def test_shard_does_not_know_the_compilers_options(option):
    refuses(build("gpt"), option, shard, error=(ConfigError, TypeError), **{option: None})


# A model that was refused once


def test_a_refused_model_can_be_sharded_afterwards():
    model = build("gpt")
    for wrong in (says_yes, ["encoder.*"], 3):
        with pytest.raises(ConfigError):
            fsdp_compile(model, auto_wrap_policy=wrong)
    functools.partial(fsdp_compile, backend="aot_eager")(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    model(*model.inputs(4, seed=0)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@front_ends
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_writes_to_its_weight(front_end, kind):
    model = nn.Sequential(kind(10, 4, max_norm=0.5), nn.Linear(4, 4))
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    model(tokens)
    with untouched(model, tokens), pytest.raises(ConfigError, match=r"0 \((Embedding|EmbeddingBag)\) has max_norm"):
        front_end(model)
