"""transformers' own plans of tensor and expert parallelism, with its FSDP2 made ours: as the model in one process."""

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import ConfigError, compat, fsdp_compile
from tests.distributed.training import assert_close, assert_same_parameters, full, sgd
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")
distributed = pytest.importorskip("transformers.distributed")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1
    ),
}


def saved(path, name):
    """The folder, with a checkpoint, which the first rank has written."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(MODELS[name]()).save_pretrained(path)
    dist.barrier()
    return path


def loaded(path, **sizes):
    config = {} if not sizes else {"distributed_config": distributed.DistributedConfig(**sizes)}
    return transformers.AutoModelForCausalLM.from_pretrained(path, **config)


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


CASES = [
    ("llama", {"fsdp_size": 2, "tp_size": 2}),
    ("qwen3_moe", {"fsdp_size": 2, "tp_size": 2}),
    ("qwen3_moe", {"fsdp_size": 4, "ep_size": 2}),
]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=lambda value: str(value).replace(" ", ""))
@on_ranks(4)
def test_it_trains_evaluates_and_saves_as_the_whole_model(world_size, name, sizes, tmp_path):
    path = saved(tmp_path / "initial", name)
    with compat.install(backend="aot_eager"):
        model, expected = loaded(path, **sizes), loaded(path)
    tp_size = sizes.get("tp_size", 1)
    optimizers = sgd(model.parameters()), sgd(expected.parameters())
    torch.manual_seed(1)
    tokens = torch.randint(64, (world_size // tp_size, 2, 8))
    own = tokens[dist.get_rank() // tp_size]
    loss_of(model.train(), own).backward()
    torch.stack([loss_of(expected.train(), rows) for rows in tokens]).mean().backward()
    for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(full(parameter.grad), wanted.grad)
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        losses = [loss_of(one.eval(), own) for one in (model, expected)]
    assert_close(*losses)
    assert_same_parameters(model, expected)
    assert model.graphs
    model.save_pretrained(tmp_path / "trained")
    dist.barrier()
    assert_same_parameters(loaded(tmp_path / "trained"), expected)


@on_ranks(2)
def test_what_is_split_in_pieces_is_not_sharded_on_the_same_dimension(world_size):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = torch.nn.Linear(8, 8, bias=False)
    strided = torch.distributed.tensor.placement_types._StridedShard(0, split_factor=2)
    linear.weight = torch.nn.Parameter(
        torch.distributed.tensor.distribute_tensor(linear.weight.detach(), mesh["tp"], [strided])
    )
    with pytest.raises(ConfigError, match="weight is a DTensor with the placements .* sharded on dimension 0, too"):
        fsdp_compile(linear, mesh["dp"], backend="aot_eager")
