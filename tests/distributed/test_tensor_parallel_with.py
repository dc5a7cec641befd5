"""Tensor parallelism together with what else a training has: a small language model on 2 x 2 ranks."""

import contextlib

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_compile
from tests.distributed.test_tensor_parallel import WIDTH, Block
from tests.distributed.training import CLOSE, STEPS, adamw
from tests.models import DEVICE
from tests.ranks import on_ranks

WORDS, HIDDEN, LENGTH = 14, 12, 5


class Language(nn.Module):
    """Predicts words. It may compute its blocks again in the backward."""

    def __init__(self, *, is_checkpointed=False, is_tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(HIDDEN), Block(HIDDEN)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.is_checkpointed = is_checkpointed
        if is_tied:
            self.tie()

    def tie(self):
        self.head.weight = self.embedding.weight

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


def parallel(model, mesh, *, is_tied=False, **head):
    """Every matrix is split, that of the embedding and that of the head by words."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
        "head": ColwiseParallel(**(head or {"output_layouts": Replicate()})),
    }
    parallelize_module(model, mesh, plan)
    if is_tied:
        model.tie()
    return model


def root_mesh():
    torch._dynamo.reset()  # past its limit of programs it breaks graphs, and fails to break those of DTensors
    return init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "tp"))


def words_of(step, row):
    """Those of one rank along dp."""
    torch.manual_seed(100 * step + row)
    return torch.randint(WORDS, (3, LENGTH + 1), device=DEVICE)


def loss_of(model, words):
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def train(model, rows, *, micro_batches=1, around=contextlib.nullcontext):
    """A few steps over these ranks' words, the last of the micro-batches of which reduces; losses and norms."""
    optimizer = adamw(parameter for parameter in model.parameters() if parameter.requires_grad)
    results = []
    for step in STEPS:
        sums = torch.zeros((), device=DEVICE)
        for row in rows:
            for part in range(micro_batches):
                keeps = model.no_sync if hasattr(model, "no_sync") and part < micro_batches - 1 else around
                with keeps():
                    loss = loss_of(model, words_of(10 * step + part, row)) / (len(rows) * micro_batches)
                    loss.backward()
                sums += loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()
        clip = getattr(model, "clip_grad_norm_", None) or (
            lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)
        )
        norm = clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        if len(rows) == 1:
            dist.all_reduce(sums)
            sums /= dist.get_world_size()
        results += [sums, norm]
    return results


def assert_trains_as(model, expected, *, num_splits=2, close=CLOSE, **options):
    """So many ranks, one after another, split the model, and see the same words."""
    wanted = train(expected, range(dist.get_world_size() // num_splits), **options)
    torch.testing.assert_close(train(model, [dist.get_rank() // num_splits], **options), wanted, **close)
    for (name, parameter), value in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), value, **close, msg=name)
        assert parameter.requires_grad == value.requires_grad


def sharded(model=None, *, is_tied=False, **options):
    root = root_mesh()
    model = parallel(Language() if model is None else model, root["tp"], is_tied=is_tied)
    return fsdp_compile(model, root["dp"], **({"backend": "aot_eager"} | options))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(4)
def test_embeddings_and_heads_that_are_split_by_words(world_size, backend):
    assert_trains_as(sharded(backend=backend, fullgraph=True), Language())


@on_ranks(4)
def test_tied_words(world_size):
    model = sharded(Language(is_tied=True), is_tied=True)
    assert model.head.weight is model.embedding.weight
    assert_trains_as(model, Language(is_tied=True))


@on_ranks(4)
def test_gradients_that_are_accumulated(world_size):
    assert_trains_as(sharded(), Language(), micro_batches=2)


@on_ranks(4)
def test_frozen_parameters(world_size):
    """As with adapters: little is trained, in units that are mostly frozen."""
    model, expected = Language(), Language()
    for each in (model, expected):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("norm" in name or "up" in name)
    assert_trains_as(sharded(model), expected)


@on_ranks(4)
def test_activations_that_are_computed_again(world_size):
    assert_trains_as(sharded(Language(is_checkpointed=True)), Language())


@on_ranks(4)
def test_a_model_without_memory(world_size):
    """It is split and sharded on the meta device, and gets the values of a full state."""
    with torch.device("meta"):
        model = Language()
    model = sharded(model)
    model.to_empty(device=DEVICE)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(Language().state_dict()) if dist.get_rank() == 0 else {}, options=options)
    assert_trains_as(model, Language())


@on_ranks(4)
def test_shards_in_the_cpus_memory(world_size):
    assert_trains_as(sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), Language())


@on_ranks(4)
def test_mixed_precision(world_size):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    assert_trains_as(sharded(mp_policy=policy), Language(), close={"rtol": 0.05, "atol": 0.02})


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
@on_ranks(4)
def test_hybrid_sharding(world_size, sizes):
    """A mesh of three dimensions: copies, shards, and parts of tensor parallelism."""
    torch._dynamo.reset()
    root = init_device_mesh(DEVICE.type, sizes, mesh_dim_names=("replicate", "shard", "tp"))
    model = fsdp_compile(parallel(Language(), root["tp"]), root["replicate", "shard"], backend="aot_eager")
    assert_trains_as(model, Language(), num_splits=sizes[2])


@on_ranks(4)
def test_loss_of_words_that_are_split(world_size):
    root = root_mesh()
    model = parallel(Language(), root["tp"], output_layouts=Shard(-1), use_local_output=False)
    model = fsdp_compile(model, root["dp"], backend="aot_eager")
    assert_trains_as(model, Language(), around=loss_parallel)


@on_ranks(4)
def test_checkpoints_move_between_meshes(world_size):
    model = sharded()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.testing.assert_close(state, dict(Language().state_dict()), rtol=0, atol=0)
    other = {name: value + 1 for name, value in Language().state_dict().items()}
    four = init_device_mesh(DEVICE.type, (1, 4), mesh_dim_names=("dp", "tp"))
    all_split = fsdp_compile(parallel(Language(), four["tp"]), four["dp"], backend="aot_eager")
    none_split = fsdp_compile(Language(), backend="aot_eager")
    for each in (model, all_split, none_split):
        set_model_state_dict(each, dict(other), options=options)
        read = get_model_state_dict(each, options=options)
        if dist.get_rank() == 0:
            torch.testing.assert_close(read, other, rtol=0, atol=0)
