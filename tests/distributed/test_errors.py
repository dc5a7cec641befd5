"""What is refused, with which words; the model is untouched afterwards.

One process: the "fake" process group has the ranks of a large job and sends nothing.
"""

import contextlib
import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._composable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compile import ConfigError, fsdp_compile, rewrite, shard
from fsdp_compile.compat import fully_shard
from tests.models import DEVICE, Block, OddMlp, build, everything_of
from tests.ranks import join_fake_group

pytestmark = pytest.mark.usefixtures("two_ranks")
front_ends = pytest.mark.parametrize("front_end", [fsdp_compile, shard])


@contextlib.contextmanager
def untouched(model, *inputs):
    """After the block the model has the same objects, classes and hooks, and computes the same."""
    before, expected = everything_of(model), model(*inputs)
    yield
    assert everything_of(model) == before
    assert torch.equal(model(*inputs), expected)
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter, name


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
def test_a_parameter_that_is_no_number(front_end):
    model = build("odd_mlp")
    model.layers[2].table = nn.Parameter(torch.zeros(6, dtype=torch.bool), requires_grad=False)
    refuses(model, "layers.2.table bool floating integers", front_end)


@front_ends
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_parameter_that_has_its_say_in_the_all_gather(front_end, is_distributed, monkeypatch):
    """As float8 weights of torchao have."""
    monkeypatch.setattr(TwoTensor, "fsdp_pre_all_gather", lambda *_: None, raising=False)
    model, weight = build("odd_mlp"), TwoTensor(torch.ones(7, 5), torch.ones(7, 5))
    if is_distributed:
        mesh = init_device_mesh(DEVICE.type, (1, 2), mesh_dim_names=("dp", "tp"))["tp"]
        weight = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
    model.layers[0].weight = nn.Parameter(weight)
    with refused("layers.0.weight TwoTensor fsdp_pre_all_gather not called ignored_params"):
        front_end(model)


@front_ends
def test_a_parameter_that_holds_other_tensors(front_end):
    model = build("odd_mlp")
    model.layers[0].weight = nn.Parameter(TwoTensor(torch.ones(7, 5), torch.ones(7, 5)))
    with refused("layers.0.weight TwoTensor plain ignored_params"):
        front_end(model)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_shard_that_is_to_have_its_say_in_the_all_gather(mode):
    """As torch's own tests do it, on the tensor itself."""
    model = build("odd_mlp")
    inputs = model.inputs(4, seed=0)
    sharded = fsdp_compile(model, backend="aot_eager")
    local = sharded.layers[0].weight._local_tensor
    local.fsdp_pre_all_gather = local.fsdp_post_all_gather = lambda *_: None
    with mode(), refused("layers.0.weight fsdp_pre_all_gather not called"):
        sharded(*inputs)


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
    mesh = init_device_mesh(DEVICE.type, (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    refuses(build("odd_mlp"), "mesh 3", front_end, mesh=mesh)


@front_ends
@pytest.mark.parametrize("names", [("dp", "tp"), ("pp", "dp"), ("tp",)])
def test_a_mesh_with_a_dimension_that_splits_models(front_end, names):
    join_fake_group(world_size=4)
    mesh = init_device_mesh(DEVICE.type, (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)
    refuses(build("odd_mlp"), "tp" if "tp" in names else "pp", front_end, mesh=mesh)


def test_a_mesh_together_with_a_process_group():
    mesh = init_device_mesh(DEVICE.type, (2,))
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
    "collective_pieces": [0, True, "many"],
    "gradient_reduction": ["median", None],
    "sharding_strategy": ["auto", 1, None],
    "mp_policy": [torch.bfloat16, {"encoder.*": MixedPrecisionPolicy()}],
    "offload_policy": ["cpu", True],
    "ignored_params": ["weight", ["weight"], [torch.ones(2)], [nn.Parameter(torch.ones(3))]],
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


class Lookup(nn.Sequential):
    """A table that is looked up by a module, or by a function."""

    def __init__(self, kind=nn.Embedding, *, sparse=True, by_function=False):
        super().__init__(kind(10, 4, sparse=sparse), nn.Linear(4, 4))
        self.by_function = by_function

    def forward(self, tokens):
        found = nn.functional.embedding(tokens, self[0].weight, sparse=True) if self.by_function else self[0](tokens)
        return self[1](found)


TOKENS = torch.tensor([[1, 2, 2], [0, 9, 1]])


@front_ends
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_sparse_gradients(front_end, kind):
    model = Lookup(kind)
    with untouched(model, TOKENS), refused(f"0 ({kind.__name__}) sparse=True ignored_params"):
        front_end(model)
    ignoring = Lookup(kind)
    front_end(ignoring, ignored_params=[ignoring[0].weight])
    ignoring(TOKENS).sum().backward()
    assert ignoring[0].weight.grad.is_sparse


@front_ends
@pytest.mark.parametrize("case", ["by a function", "unfrozen"])
def test_sparse_gradients_that_show_in_the_graph_only(front_end, case):
    model = Lookup(sparse=case == "unfrozen", by_function=case == "by a function")
    model[0].requires_grad_(case != "unfrozen")
    front_end(model)
    model[0].requires_grad_(True)
    with refused("0.weight sparse"):
        model(TOKENS).sum().backward()


def test_a_single_rank_has_sparse_gradients():
    join_fake_group(0)
    model, expected = Lookup(), Lookup()
    expected.load_state_dict(model.state_dict())
    for each in (fsdp_compile(model, backend="aot_eager"), expected):
        each(TOKENS).sum().backward()
    assert torch.equal(model[0].weight.grad.to_dense(), expected[0].weight.grad.to_dense())


def test_rewrite_refuses_sparse_gradients_as_sharding_does():
    with refused("0 (Embedding) sparse=True"):
        rewrite(Lookup(), TOKENS, world_size=2)


# Wrappers of others


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.own, self.inner = nn.Linear(2, 2), inner


FSDP1 = functools.partial(FullyShardedDataParallel, device_id=DEVICE)
WRAPPERS = {
    "DistributedDataParallel": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "FullyShardedDataParallel": FSDP1,
    "fully_shard": torch.distributed.fsdp.fully_shard,
    "replicate": torch.distributed._composable.replicate,
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_wrapper_around_a_sharded_model(wrapper):
    model = fsdp_compile(build("odd_mlp"), backend="aot_eager")
    batch = model.inputs(4, seed=0)
    loss = model(*batch)
    before = everything_of(model)
    for module, words in ((model, "OddMlp layers.0.weight"), (model.layers[2], "Linear weight")):
        with refused(f"{wrapper} around {words}"):
            WRAPPERS[wrapper](module)
    if wrapper in ("DistributedDataParallel", "DataParallel"):
        with refused(f"{wrapper} around Outer inner.layers.0.weight"):
            WRAPPERS[wrapper](Outer(model))
    assert everything_of(model) == before
    assert torch.equal(model(*batch), loss)
    copy.deepcopy(model)(*batch)


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
def test_a_model_that_a_wrapper_holds(wrapper):
    for model, words in (
        (WRAPPERS[wrapper](nn.Linear(4, 4)), "model"),
        (Outer(WRAPPERS[wrapper](nn.Linear(4, 4))), "inner"),
    ):
        before = everything_of(model)
        with refused(f"{words} wrapped already {wrapper} instead"):
            shard(model)
        assert everything_of(model) == before
    if wrapper == "DistributedDataParallel":
        shard(model, ignored_params=list(model.inner.parameters()))


def test_wrappers_that_have_nothing_to_do_with_what_is_sharded():
    model = Outer(shard(nn.Linear(4, 4)))
    model._ddp_params_and_buffers_to_ignore = ["inner.weight", "inner.bias"]
    DistributedDataParallel(model, init_sync=False)


# Parameters that came after sharding


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Scaled(OddMlp):
    """Uses what it is given."""

    def forward(self, x, target):
        scale = self.scale if "scale" in self._parameters else 1.0
        return super().forward(x * scale, target)


BUILT_BEFORE = nn.Linear(3, 3)


def assign(path, make):
    def give(model):
        owner, _, name = path.rpartition(".")
        owner = model.get_submodule(owner)
        setattr(owner, name, make(getattr(owner, name, None)))

    return give


GIVEN = {
    "another layer": (assign("layers.4", lambda layer: nn.Linear(15, 3)), "layers.4.weight, layers.4.bias"),
    "one more layer": (lambda model: model.layers.append(nn.Linear(3, 3)), "layers.5.weight"),
    "one built before": (lambda model: model.layers._modules.update({"5": BUILT_BEFORE}), "layers.5.weight"),
    "a parameter": (lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(()))), "scale"),
    "an adapter": (assign("layers.2", Lora), "layers.2.down.weight, layers.2.down.bias, layers.2.up.weight and 1 more"),
    "a plain weight": (assign("layers.2.weight", lambda weight: nn.Parameter(torch.ones(15, 7))), "layers.2.weight"),
    "a parametrization": (lambda model: nn.utils.parametrizations.weight_norm(model.layers[2]), "layers.2.weight"),
    "a part of a part": (lambda model: model.layers.add_module("5", nn.Sequential(nn.Linear(3, 3))), "layers.5.0.bias"),
}


def trains(front_end, model):
    return fsdp_compile(model, backend="aot_eager") if front_end is fsdp_compile else shard(model)


@front_ends
@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize("kind", list(GIVEN))
def test_a_parameter_that_came_after_sharding(front_end, kind, is_called_before):
    give, words = GIVEN[kind]
    model = trains(front_end, Scaled())
    batch = model.inputs(4, seed=0)
    if is_called_before:
        model(*batch).backward()
    give(model)
    for _ in range(2):
        with refused(words):
            model(*batch)


@front_ends
def test_parameters_that_came_after_sharding_and_do_no_harm(front_end):
    model = Scaled()
    model.scale, model.other = nn.Parameter(torch.ones(())), nn.Linear(2, 2)
    batch = model.inputs(4, seed=0)
    critic = nn.Linear(1, 1)
    ignored = [model.scale, *model.other.parameters()]
    options = {"backend": "aot_eager"} if front_end is fsdp_compile else {}
    front_end(model, ignored_params=ignored, **options)
    model(*batch).backward()
    model.scale = nn.Parameter(torch.full((), 2.0))  # in the place of one that is ignored
    model.other = nn.ModuleDict({"ignored": model.other})
    model.layers.append(nn.Linear(3, 3).requires_grad_(False))
    model.layers.append(trains(front_end, nn.Linear(3, 3)))
    model.register_forward_hook(lambda module, args, output: output + critic(output.view(1, 1)).sum())
    model(*batch).backward()
    copied = copy.deepcopy(model)
    copied(*batch).backward()
    for sharded in (model, copied):
        with torch.no_grad():
            sharded.late = nn.Linear(2, 2)
            sharded(*batch)
        with refused("late.weight"):
            sharded(*batch)
        sharded.late.requires_grad_(False)
        sharded(*batch).backward()
        sharded.late.weight.requires_grad_(True)
        sharded.layers.append(nn.Identity())  # Dynamo compiles anew
        with refused("late.weight"):
            sharded(*batch)
    assert "late.bias" in model.state_dict()


def test_a_parameter_that_came_between_two_shardings():
    model = build("odd_mlp")
    fully_shard(model.layers)
    model.layers.append(nn.Linear(3, 3))
    with refused("layers.5.weight, layers.5.bias layers sharded"):
        fsdp_compile(model)
    fsdp_compile(model, ignored_params=list(model.layers[5].parameters()), backend="aot_eager")
    model(*model.inputs(4, seed=0)).backward()


def test_a_part_that_came_after_sharding_is_called_by_itself():
    model = shard(build("gpt"))
    model.blocks[0].extra = nn.Linear(2, 2)
    with refused("extra.weight Block"):
        model.blocks[0](torch.zeros(1, 3, 32))
    model.blocks[1](torch.zeros(1, 3, 32))


@front_ends
def test_a_module_that_is_taken_out_after_sharding(front_end):
    model = trains(front_end, build("odd_mlp"))
    batch = model.inputs(4, seed=0)
    model(*batch).backward()
    model.layers[4] = nn.Identity()
    expected = model(*batch)
    assert [*model.state_dict()] == ["layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(*batch), expected)
        with other.summon_full_params():
            assert [*other.state_dict()] == [*model.state_dict()]


def test_a_model_with_a_parameter_that_came_after_sharding_is_not_saved():
    model = shard(build("odd_mlp"))
    model.layers.append(nn.Linear(3, 3))
    with refused("layers.5.weight"):
        pickle.dumps(model)


def test_with_a_single_rank_parameters_may_come_at_any_time():
    join_fake_group(0)
    model = fsdp_compile(build("odd_mlp"), backend="aot_eager")
    model.layers.append(nn.Linear(3, 3))
    model(*model.inputs(4, seed=0)).backward()
    assert model.layers[5].weight.grad is not None
