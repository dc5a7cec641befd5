"""Activation checkpointing: every kind trains as the unsharded model, and a recomputed unit is gathered once more."""

import functools

import pytest
import torch
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import compat, fsdp_compile, rewrite, shard
from fsdp_compile.passes import analysis, ops
from tests.distributed.training import (
    STEPS,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_as,
    average_gradients,
    batch_of_rank,
    both_front_ends,
    compiled,
    gathered_units,
    sgd,
    take_step,
    torch_compiled,
    train,
)
from tests.models import DEVICE, Block, Gpt, Regression, build, made
from tests.ranks import on_ranks

FRONT_ENDS = {"compiled": compiled, "eager": shard}
memory_budget = torch._functorch.config.patch
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective_policy": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_matmuls),
    },
    "selective_ops": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, MATMULS),
    },
}


class CheckpointedGpt(Gpt):
    """Every block is computed again in the backward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, **KINDS[self.kind])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", list(KINDS))
@both_front_ends
@on_ranks(2)
def test_a_checkpointed_model_trains(world_size, front_end, kind):
    assert_trains_as(front_end(made(CheckpointedGpt, kind)), build("gpt"), make_optimizer=sgd)


WRAPPERS = {
    "non_reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "reentrant": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
}


def wrap_blocks(model, kind):
    apply_activation_checkpointing(model, WRAPPERS[kind], check_fn=lambda module: isinstance(module, Block))
    return model


@pytest.mark.parametrize("kind", list(WRAPPERS))
@both_front_ends
@on_ranks(2)
def test_modules_wrapped_before_sharding(world_size, front_end, kind):
    model = front_end(wrap_blocks(build("gpt"), kind))
    assert list(model.state_dict()) == list(build("gpt").state_dict())
    assert_trains_as(model, wrap_blocks(build("gpt"), kind), make_optimizer=sgd)


@both_front_ends
@on_ranks(2)
def test_modules_wrapped_after_sharding(world_size, front_end):
    model = wrap_blocks(front_end(build("gpt")), "non_reentrant")
    assert_trains_as(model, wrap_blocks(build("gpt"), "non_reentrant"), make_optimizer=sgd)


def compose(model, **options):
    """torch's composable checkpointing: hooks on every block."""
    for block in model.blocks:
        composable(block, **options)
    return model


def fully_sharded(model, backend="aot_eager", **options):
    for part in (*model.blocks, model):
        compat.fully_shard(part, backend=backend, **options)
    return model


def gpt_with_shared_weights():
    model = build("gpt")
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def mesh_of_replicas():
    return init_device_mesh(DEVICE.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


COMPOSED = {
    "units": lambda: fully_sharded(compose(build("gpt"))),
    "selective after sharding": lambda: compose(
        fully_sharded(build("gpt"), mesh=mesh_of_replicas()), context_fn=KINDS["selective_policy"]["context_fn"]
    ),
    "within another": lambda: torch_compiled(composable(compose(build("gpt")))),
    "eager": lambda: shard(compose(build("gpt"))),
}


@pytest.mark.parametrize("case", list(COMPOSED))
@on_ranks(2)
def test_modules_with_composable_checkpointing_train(world_size, case):
    """What their hooks enclosed was compiled in the forward, and computed again in eager (CheckpointError)."""
    model = COMPOSED[case]()
    assert_trains_as(model, build("gpt"), make_optimizer=sgd)
    if case == "units":
        [graphs] = model.graphs
        assert gathered_units(graphs.backward)[-2:] == ["blocks.1", "blocks.0"]


@on_ranks(2)
def test_composable_checkpointing_compiled_by_inductor_with_shared_weights(world_size):
    model = fully_sharded(compose(gpt_with_shared_weights()), backend="inductor")
    assert_trains_as(model, gpt_with_shared_weights(), make_optimizer=sgd)


@on_ranks(2)
def test_composable_checkpointing_of_micro_batches_in_mixed_precision(world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plain, model = build("gpt"), compose(build("gpt"))
    for each in (plain, model):
        fully_sharded(each, mp_policy=policy)
        for step in range(4):
            each.set_requires_gradient_sync(step % 2 == 1)
            each(*batch_of_rank(each, step)).backward()
    assert_same_gradients(model, plain)


class ListsParameters(Regression):
    """A checkpointed method, no module, lists parameters; compiled, its graph breaks, and it runs in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x, target):
        return F.mse_loss(self.head(checkpoint(self.decayed, x, use_reentrant=False)), target)

    def decayed(self, x):
        torch._dynamo.graph_break()
        return torch.tanh(self.mix(x)) * sum(torch.cos(each).mean() for each in self.mix.parameters())


@both_front_ends
@on_ranks(2)
def test_a_method_that_is_computed_again_lists_full_parameters(world_size, front_end):
    assert_trains_as(front_end(made(ListsParameters)), made(ListsParameters), make_optimizer=sgd)


# What the graphs of checkpointed models look like


def graphs_of(model):
    torch._dynamo.reset()
    return rewrite(model, *model.inputs(3, seed=0), world_size=2, reshard_after_forward=True)


def saved(graphs):
    """The shapes of what the forward saves: shards (1-D), and activations of 3 x 8 tokens."""
    taken = [node for node in analysis.inputs(graphs.backward.graph) if "tangents" not in str(node.target)]
    shapes = [node.meta["val"].shape for node in taken]
    return [tuple(shape) for shape in shapes if len(shape) > 1]


def num_matmuls(graph):
    return sum(ops.is_call(node, *MATMULS) for node in graph.nodes)


INDICES = [(3, 8), (3, 8)]  # tokens and targets
AFTER_THE_BLOCKS = [(3, 8, 1), (3, 8, 1), (24, 32), (24, 48), (24, 1), (24, 1)]  # norm, head, loss


@pytest.mark.parametrize(
    "model",
    [
        *(functools.partial(CheckpointedGpt, kind) for kind in ("non_reentrant", "reentrant")),
        *(lambda kind=kind: wrap_blocks(Gpt(), kind) for kind in ("non_reentrant", "reentrant")),
        lambda: compose(Gpt()),
    ],
    ids=["non_reentrant", "reentrant", "wrapped_non_reentrant", "wrapped_reentrant", "composable"],
)
def test_a_recomputed_unit_is_gathered_once_more_and_only_its_input_is_saved(model):
    graphs = graphs_of(model())
    assert gathered_units(graphs.forward) == ["tokens+positions", "blocks.0", "blocks.1"]
    assert gathered_units(graphs.backward) == ["tokens+positions", "blocks.1", "blocks.0"]
    assert saved(graphs) == [*INDICES, *[(3, 8, 32)] * 2, *AFTER_THE_BLOCKS]


@pytest.mark.parametrize("kind", ["selective_policy", "selective_ops"])
def test_a_selective_policy_decides_what_is_saved(kind):
    graphs, plain = graphs_of(CheckpointedGpt(kind)), graphs_of(Gpt())
    assert gathered_units(graphs.backward) == ["tokens+positions", "blocks.1", "blocks.0"]
    assert num_matmuls(graphs.backward.graph) == num_matmuls(plain.backward.graph)
    block = [(3, 8, 32), (24, 96), (24, 32), (24, 64)]  # its input, and the results of all matmuls but the last
    assert saved(graphs) == [*INDICES, *block, *block, (24, 32), *AFTER_THE_BLOCKS]


# Random numbers


class NoisyBlock(nn.Module):
    """Draws random numbers in two ways; `noise` from nothing but a shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.down(F.dropout(torch.tanh(self.up(x)), 0.3))
        return x + torch.rand(x.shape) * torch.sin(x)


class NoisyModel(Regression):
    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.kind = None if kind == "composable" else kind
        self.stem = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([NoisyBlock(5) for _ in range(2)])
        self.head = nn.Linear(5, 1)
        if kind == "composable":
            compose(self)

    def forward(self, x, target):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.kind is None else checkpoint(block, x, **KINDS[self.kind])
        return F.mse_loss(self.head(F.dropout(x, 0.2)), target)


def train_noisy_replicas(kind, world_size):
    """One eager model per rank, each with that rank's rows and random numbers, gradients averaged."""
    replicas = [made(NoisyModel, kind) for _ in range(world_size)]
    optimizers = [sgd(replica.parameters()) for replica in replicas]
    states = [state_of_rank(rank) for rank in range(world_size)]
    for step in STEPS:
        for rank, replica in enumerate(replicas):
            torch.set_rng_state(states[rank])
            replica(*batch_of_rank(replica, step, rank)).backward()
            states[rank] = torch.get_rng_state()
        average_gradients(replicas)
        take_step(optimizers)
    return replicas[0]


def state_of_rank(rank):
    return torch.Generator().manual_seed(1000 + rank).get_state()


@pytest.mark.parametrize(
    ("front_end", "kind", "budget"),
    [
        *(("compiled", kind, 1.0) for kind in (None, "composable", "non_reentrant", "reentrant", "selective_policy")),
        *(("eager", kind, 1.0) for kind in (None, "non_reentrant", "reentrant")),
        ("compiled", None, 0.1),
        ("compiled", None, 0.0),
        ("compiled", "non_reentrant", 0.0),
    ],
)
@on_ranks(2)
def test_random_numbers_are_those_of_the_unsharded_model(world_size, front_end, kind, budget):
    """Seeded once: a number drawn too often or too seldom changes every later step."""
    expected = train_noisy_replicas(kind, world_size)
    with memory_budget(activation_memory_budget=budget):
        model = FRONT_ENDS[front_end](made(NoisyModel, kind))
        torch.set_rng_state(state_of_rank(dist.get_rank()))
        train(model, sgd(model.parameters()), STEPS)
    assert_same_parameters(model, expected)


class ShowsItsMask(Regression):
    """Returns the result of its dropout besides the loss, so that a test knows the mask; or takes a mask."""

    def __init__(self, kind: str | None) -> None:
        super().__init__()
        self.kind = kind
        self.stem = nn.Linear(5, 5)
        self.up = nn.Linear(5, 32)
        self.down = nn.Linear(32, 1)

    def forward(self, x, target, mask=None):
        x = self.stem(x)
        y, dropped = self.block(x, mask) if self.kind is None else checkpoint(self.block, x, mask, **KINDS[self.kind])
        return F.mse_loss(y, target), dropped.detach()

    def block(self, x, mask):
        x = torch.tanh(self.up(x))
        dropped = F.dropout(x) if mask is None else x * mask
        return self.down(torch.sin(dropped)), dropped


@pytest.mark.parametrize(
    ("kind", "budget"), [("non_reentrant", 1.0), ("reentrant", 1.0), (None, 0.1), (None, 0.0), ("non_reentrant", 0.0)]
)
@on_ranks(2)
def test_inductor_recomputes_with_the_mask_of_the_forward(world_size, kind, budget):
    """Inductor draws random numbers of its own; what matters is that forward and backward see the same ones."""
    replicas = [made(ShowsItsMask, None) for _ in range(world_size)]
    with memory_budget(activation_memory_budget=budget):
        model = fsdp_compile(made(ShowsItsMask, kind))
        for step in range(2):
            loss, dropped = model(*batch_of_rank(model, step))
            loss.backward()
            masks = [torch.empty_like(dropped) for _ in range(world_size)]
            dist.all_gather(masks, 2.0 * (dropped != 0))
            for rank, replica in enumerate(replicas):
                replica(*batch_of_rank(replica, step, rank), masks[rank])[0].backward()
    assert 0.2 < (dropped == 0).float().mean() < 0.8
    average_gradients(replicas)
    assert_same_gradients(model, replicas[0])
