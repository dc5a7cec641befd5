"""Models of Hugging Face transformers and adapters of peft train unmodified, and what is saved loads anywhere.

The ranks train and save. The process of the test, which has no process group, trains the unsharded model on the rows of
all ranks, loads what was saved, and compares.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fsdp_compile import fsdp_compile, rewrite
from tests.distributed.training import (
    assert_close,
    assert_same_gradients,
    assert_same_tensors,
    compiled,
    full_gradients,
    full_parameters,
    mean_over_ranks,
    names_of_none,
    take_step,
)
from tests.ranks import on_ranks, run_on_ranks

RANKS = range(2)
STEPS = range(5)
VOCABULARY = 67  # no world size divides it


def llama(**options: object) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,  # at the default, so small a model hardly depends on its input
        **options,
    )
    return LlamaForCausalLM(config)


def gpt2() -> PreTrainedModel:
    """Tied embeddings, learned positions, weights stored transposed, and dropout, all of it by default."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def mixture(kind: type[PreTrainedModel], config: type[PreTrainedConfig], **options: object) -> PreTrainedModel:
    """Experts that a router picks for each token, some of which may get none."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return kind(config(**sizes, **heads, initializer_range=0.2, **options))


mixtral = functools.partial(mixture, MixtralForCausalLM, MixtralConfig, intermediate_size=48, num_local_experts=4)
qwen3_moe = functools.partial(
    mixture, Qwen3MoeForCausalLM, Qwen3MoeConfig, head_dim=8, moe_intermediate_size=24, num_experts=4
)

BUILDERS = {
    "llama": llama,
    "llama_tied": functools.partial(llama, tie_word_embeddings=True),
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return BUILDERS[name]()


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(100 * step + rank))


def run(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of that rank's rows; dropout draws the same numbers wherever they are computed."""
    torch.manual_seed(100 * step + rank)
    rows = rows_of(rank, step)
    return model(input_ids=rows, labels=rows).loss


def train(model: nn.Module, ranks: list[int]) -> Tensor:
    """The mean loss of these ranks' rows at every step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The gradient of an attention key's bias is zero in theory: eps keeps AdamW from making steps of its rounding.
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4)
    losses = []
    for step in STEPS:
        losses.append(torch.zeros(()))
        for rank in ranks:
            loss = run(model, rank, step) / len(ranks)
            loss.backward()
            losses[-1] += loss.detach()
        take_step([optimizer])
    return torch.stack(losses)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the ranks send: losses, full parameters by name, and what the backward of every graph communicates."""

    losses: Tensor
    parameters: dict[str, Tensor]
    backwards: list[str]

    @classmethod
    def on_this_rank(cls, model: nn.Module) -> Trained:
        losses = mean_over_ranks(train(model, [dist.get_rank()]))
        backwards = [communication(graphs.backward.schedule()) for graphs in model.graphs]
        return cls(losses, full_parameters(model), backwards)


def communication(schedule: str) -> str:
    """What a schedule gathers and reduces, in order."""
    found = re.findall(
        r"^ +(all_gather|reduce_scatter|all_reduce) +(?:base_model\.model\.)?(\S+)", schedule, re.MULTILINE
    )
    return "\n".join(f"{what:<14} {bucket}" for what, bucket in found)


def assert_bitwise_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert list(parameters) == list(expected)
    for name, parameter in parameters.items():
        assert parameter.dtype == expected[name].dtype and torch.equal(parameter, expected[name]), name


# ----------------------------------------------------------------------------------------------------------
# The whole model


@pytest.fixture(scope="module", params=["llama", "llama_tied", "gpt2"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(name)


@pytest.fixture(scope="module")
def trained(name: str, folder: Path) -> Trained:
    backend = "inductor" if name == "llama_tied" else "aot_eager"
    return run_on_ranks(len(RANKS), train_and_save, name, folder, backend)[0]


def train_and_save(name: str, folder: Path, backend: str) -> Trained:
    model = fsdp_compile(build(name), backend=backend)
    trained = Trained.on_this_rank(model)
    save_from_rank_0(model, folder / "from_rank_0")
    save_from_all_ranks(model, folder / "from_all_ranks")
    return trained


def save_from_rank_0(model: PreTrainedModel, folder: Path) -> None:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


def save_from_all_ranks(model: PreTrainedModel, folder: Path) -> None:
    """Every rank writes its shards, and the files are joined: no rank ever holds the whole model."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    # Not the state_dict: it has tied parameters under both names, which safetensors refuses.
    dcp.save(dict(model.named_parameters()), storage_writer=writer)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)


def test_training_equals_the_unsharded_model(name: str, trained: Trained) -> None:
    """Tied embeddings are used by two units here, for which fully_shard of torch 2.13 raises."""
    expected = build(name)
    assert_close(trained.losses, train(expected, RANKS))
    assert_same_tensors(trained.parameters, full_parameters(expected))


@pytest.mark.parametrize("saved", ["from_rank_0", "from_all_ranks"])
def test_from_pretrained_loads_what_was_saved(name: str, trained: Trained, folder: Path, saved: str) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder / saved, output_loading_info=True)
    assert not any(report.values()), report  # no key missing, none unexpected
    assert type(model) is type(build(name))
    assert_bitwise_equal(model, trained.parameters)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == (name != "llama")


def test_gpt2_breaks_its_graph_where_transformers_warns_once(name: str, trained: Trained) -> None:
    """So it does with any compiler; a model that names its loss, as below, does not warn."""
    assert len(trained.backwards) == (2 if name == "gpt2" else 1)


def test_gpt2_that_names_its_loss_is_one_graph() -> None:
    model = build("gpt2")
    model.loss_type = "ForCausalLM"
    graphs = rewrite(model, input_ids=rows_of(0, 0), labels=rows_of(0, 0), world_size=2)
    assert_expected_inline(
        communication(graphs.backward.schedule()),
        """\
all_gather     transformer.h.1
all_gather     transformer.h.0
reduce_scatter transformer.h.1
reduce_scatter transformer.h.0
reduce_scatter transformer.wte+transformer.wpe""",
    )


@pytest.mark.parametrize(("name", "backend"), [("mixtral", "aot_eager"), ("qwen3_moe", "inductor")])
@on_ranks(4)
def test_mixtures_of_experts_train_as_the_unsharded_model(world_size, name, backend):
    expected, model = build(name), fsdp_compile(build(name), backend=backend, fullgraph=True)
    losses = mean_over_ranks(train(model, [dist.get_rank()]))
    assert_close(losses, train(expected, range(world_size)))
    assert_same_tensors(full_parameters(model), full_parameters(expected))


@on_ranks(2)
def test_checkpointed_activations_give_the_gradients_of_the_unsharded_model(world_size):
    expected, model = build("gpt2"), build("gpt2")
    model.gradient_checkpointing_enable()
    compiled(model)
    run(model, dist.get_rank(), 0).backward()
    for rank in RANKS:
        (run(expected, rank, 0) / world_size).backward()
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_generate_gives_the_tokens_of_the_unsharded_model(world_size):
    expected, model = build("gpt2").eval(), compiled(build("gpt2").eval())
    tokens = [network.generate(rows_of(0, 0), max_new_tokens=6, do_sample=False) for network in (expected, model)]
    assert tokens[0].shape == (2, 18) and torch.equal(*tokens)


# ----------------------------------------------------------------------------------------------------------
# Adapters: most of every unit is frozen


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def adapters(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def adapted(dtype: torch.dtype, adapters: Path) -> Trained:
    return run_on_ranks(len(RANKS), train_and_save_adapters, dtype, adapters)[0]


def build_adapted(dtype: torch.dtype) -> PeftModel:
    """Llama in `dtype`, frozen, and adapters on its attention, which peft makes float32."""
    config = LoraConfig(r=3, lora_dropout=0.1, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(build("llama").to(dtype), config)


def train_and_save_adapters(dtype: torch.dtype, folder: Path) -> Trained:
    model = compiled(build_adapted(dtype), fullgraph=True)
    trained = Trained.on_this_rank(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    return trained


def test_adapters_train_as_in_the_unsharded_model(dtype: torch.dtype, adapted: Trained) -> None:
    expected = build_adapted(dtype)
    assert_close(adapted.losses, train(expected, RANKS))
    assert_same_tensors(adapted.parameters, full_parameters(expected))


def test_frozen_weights_stay_as_they_were(dtype: torch.dtype, adapted: Trained) -> None:
    for name, parameter in build_adapted(dtype).named_parameters():
        assert torch.equal(adapted.parameters[name], parameter) == (not parameter.requires_grad), name


def test_frozen_weights_are_gathered_and_never_reduced(dtype: torch.dtype, adapted: Trained) -> None:
    (backward,) = adapted.backwards
    frozen = f"{str(dtype).removeprefix('torch.')}.frozen"
    assert_expected_inline(
        backward.replace(frozen, "frozen"),
        """\
all_gather     model.layers.1/frozen
all_gather     model.layers.1/float32
all_gather     model.layers.0/frozen
all_gather     model.layers.0/float32
reduce_scatter model.layers.1/float32
reduce_scatter model.layers.0/float32""",
    )


def test_saved_adapters_load_onto_the_base_model(dtype: torch.dtype, adapted: Trained, adapters: Path) -> None:
    model = PeftModel.from_pretrained(build("llama").to(dtype), adapters)
    assert_bitwise_equal(model, adapted.parameters)


@on_ranks(2)
def test_bfloat16_norms_train_beside_float32_adapters(world_size):
    """Three kinds in every unit; torch's FSDP wants one dtype, fully_shard one dtype among those that are trainable."""

    def adapters_and_norms():
        model = build_adapted(torch.bfloat16)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "layernorm" in name)
        return model

    expected, model = adapters_and_norms(), compiled(adapters_and_norms())
    run(model, dist.get_rank(), 0).backward()
    for rank in RANKS:
        (run(expected, rank, 0) / world_size).backward()

    gradients, expected_gradients = full_gradients(model), full_gradients(expected)
    assert names_of_none(gradients) == names_of_none(expected_gradients)
    for name, gradient in expected_gradients.items():
        if gradient is not None:  # assert_close knows the precision of each dtype
            torch.testing.assert_close(gradients[name], gradient)
    backward = communication(model.graphs[0].backward.schedule())
    reduced = re.findall(r"reduce_scatter model\.(\S+)", backward)
    assert sorted(reduced) == [f"layers.{layer}/{dtype}" for layer in (0, 1) for dtype in ("bfloat16", "float32")]
