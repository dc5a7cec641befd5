"""shard_placement_fn: parameters sharded on any of their dimensions train as the unsharded model, and are saved so."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_compile import ConfigError, RankError, fsdp_compile, shard
from fsdp_compile.compat import fully_shard
from tests.distributed.training import (
    adamw,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_as,
    backward_of_both,
    batch_of_rank,
    compiled,
    full_parameters,
    global_batch,
    hybrid_mesh,
    load_checkpoint,
    save_checkpoint,
    saved_and_loaded,
    train,
)
from tests.models import Regression, made
from tests.ranks import on_ranks, run_on_ranks


class Varied(Regression):
    """Dimensions that 2 and 4 divide and that neither does, three of them, a parameter in two places, one frozen.

    The forward takes views that are possible of contiguous parameters only.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.conv = nn.Conv1d(4, 6, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 4, 8) / 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(3, 8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, target):
        x = torch.tanh(self.first(x)).view(-1, 4, 2)
        x = torch.tanh(self.conv(x)).view(-1, 3, 4)  # of a convolution whose weight has other strides it would fail
        x = self.again(torch.tanh(self.tied(x)))
        x = torch.tanh(torch.bmm(x.transpose(0, 1), self.experts)).sum(0) * self.scale
        return F.mse_loss((x @ self.frozen.view(8, 3)).sum(1, keepdim=True), target)


def varied(seed=0):
    return made(Varied, seed=seed)


def last(parameter):
    return Shard(-1) if parameter.dim() else None


def longest(parameter):
    return Shard(max(range(parameter.dim()), key=parameter.shape.__getitem__)) if parameter.dim() else None


def first(parameter):
    return Shard(0) if parameter.dim() else None


def middle(parameter):
    return Shard(parameter.dim() // 2) if parameter.dim() else None


def loop(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@pytest.mark.parametrize(
    ("front_end", "place", "make_optimizer"),
    [
        pytest.param(compiled, last, adamw, id="last-foreach"),
        pytest.param(compiled, longest, fused, id="longest-fused"),
        pytest.param(partial(compiled, collective_lowering="grouped"), middle, loop, id="grouped-middle-loop"),
        pytest.param(shard, last, loop, id="eager-last-loop"),
        pytest.param(fsdp_compile, last, fused, id="inductor-last-fused"),
    ],
)
@on_ranks(2)
def test_training_is_that_of_the_unsharded_model(world_size, front_end, place, make_optimizer):
    model = front_end(varied(), shard_placement_fn=place)
    assert_trains_as(model, varied(), make_optimizer=make_optimizer)


@on_ranks(4)
def test_four_ranks_share_dimensions_that_they_do_not_divide(world_size):
    model = compiled(varied(), shard_placement_fn=last)
    assert model.first.weight.placements == (Shard(1),)
    held = torch.tensor([model.first.weight.to_local().shape[1]])
    lengths = [torch.empty_like(held) for _ in range(world_size)]
    dist.all_gather(lengths, held)
    assert torch.cat(lengths).tolist() == [2, 2, 1, 0]
    assert_trains_as(model, varied(), range(3))


@on_ranks(2)
def test_parts_and_gradients_are_contiguous_and_placed_as_the_function_says(world_size):
    model, expected = compiled(varied(), shard_placement_fn=last), varied()
    backward_of_both(model, expected)
    for name, parameter in model.named_parameters():
        placement = Replicate() if name == "scale" else Shard(parameter.dim() - 1)
        held = [parameter] if parameter.grad is None else [parameter, parameter.grad]
        for tensor in held:
            assert tensor.placements == (placement,), name
            assert tensor.is_contiguous() and tensor.to_local().is_contiguous(), name
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_clipping_equals_the_unsharded_models(world_size):
    model, expected = compiled(varied(), shard_placement_fn=longest), varied()
    backward_of_both(model, expected)
    norm = model.clip_grad_norm_(0.01)
    assert_close(norm, nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
    assert_same_gradients(model, expected)


@pytest.mark.parametrize("front_end", [compiled, shard], ids=["compiled", "eager"])
@on_ranks(2)
def test_gradients_of_micro_batches_are_kept_and_reduced_once(world_size, front_end):
    model, expected = front_end(varied(), shard_placement_fn=last), varied()
    for step in range(2):
        expected(*global_batch(expected, step)).backward()
        if step == 0:
            with model.no_sync():
                model(*batch_of_rank(model, step)).backward()
            assert model.first.weight.grad is None
        else:
            model(*batch_of_rank(model, step)).backward()
    assert_same_gradients(model, expected)


@on_ranks(4)
def test_a_hybrid_mesh_shards_any_dimension_along_its_last_axis(world_size):
    model = compiled(varied(), hybrid_mesh(), shard_placement_fn=last)
    assert model.experts.placements == (Replicate(), Shard(2))
    assert_trains_as(model, varied(), range(2))


@pytest.mark.parametrize(
    "options",
    [
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"reshard_after_forward": False},
        {"sharding_strategy": torch.distributed.fsdp.ShardingStrategy.NO_SHARD},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64, output_dtype=torch.float32)},
    ],
    ids=["offload", "kept", "no_shard", "mixed_precision"],
)
@on_ranks(2)
def test_options_go_together(world_size, options):
    model = compiled(varied(), shard_placement_fn=last, **options)
    assert_trains_as(model, varied(), range(2))


@on_ranks(2)
def test_nothing_reads_what_was_freed(world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_COMPILE_POISON", "1")
        model = fsdp_compile(varied(), shard_placement_fn=last)
    assert_trains_as(model, varied(), range(2))


@on_ranks(2)
def test_fully_shard_places_the_parameters_of_each_module(world_size):
    model, expected = varied(), varied()
    for module in (model.conv, [model.tied, model.again]):
        fully_shard(module, shard_placement_fn=last, backend="aot_eager")
    fully_shard(model, shard_placement_fn=middle, backend="aot_eager")
    assert model.conv.weight.placements == (Shard(2),)
    assert model.experts.placements == (Shard(1),)
    assert_trains_as(model, expected, range(2))


# States


FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@on_ranks(2)
def test_a_state_dict_goes_between_placements(world_size):
    """As DTensors and in full, copied, and saved by torch."""
    model = compiled(varied(), shard_placement_fn=last)
    train(model, adamw(model.parameters()), range(1))
    values = full_parameters(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_close({name: state[name] for name in values}, values)
    states = {
        "copied": copy.deepcopy(model.state_dict()),
        "saved": saved_and_loaded(model.state_dict()),
        "full": state,
    }
    for state in states.values():
        for place in (last, first):
            other = shard(varied(seed=1), shard_placement_fn=place)
            other.load_state_dict(state)
            assert_close(full_parameters(other), values)
    other = compiled(varied(seed=1), shard_placement_fn=middle)
    set_model_state_dict(other, state if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    assert_close(full_parameters(other), values)


@on_ranks(2)
def test_copies_and_files_of_the_model_train_on(world_size):
    model, expected = compiled(varied(), shard_placement_fn=last), varied()
    for other in (copy.deepcopy(model), saved_and_loaded(model)):
        assert other.first.weight.placements == (Shard(1),)
        assert_trains_as(other, copy.deepcopy(expected), range(2))
    assert_same_parameters(model, expected)


def save_on_ranks(path):
    model = compiled(varied(), shard_placement_fn=last)
    optimizer = adamw(model.parameters())
    train(model, optimizer, range(2), batch=shared_rows)
    save_checkpoint(path, model, optimizer)


def shared_rows(model, step):
    return model.inputs(4, seed=step)


def go_on_from(path, place):
    expected = varied()
    train(expected, adamw(expected.parameters()), range(4), batch=shared_rows)
    model = compiled(varied(seed=1), shard_placement_fn=place)
    optimizer = adamw(model.parameters())
    load_checkpoint(path, model, optimizer)
    train(model, optimizer, range(2, 4), batch=shared_rows)
    assert_same_parameters(model, expected)


def test_a_checkpoint_goes_to_other_ranks_and_other_dimensions(tmp_path):
    run_on_ranks(2, save_on_ranks, tmp_path)
    run_on_ranks(2, go_on_from, tmp_path, first)
    run_on_ranks(4, go_on_from, tmp_path, longest)


@on_ranks(2)
def test_full_parameters_are_written_back_to_their_parts(world_size):
    model, expected = compiled(varied(), shard_placement_fn=last), varied()
    backward_of_both(model, expected)
    with model.summon_full_params(with_grads=True):
        for parameter, plain in zip(model.parameters(), expected.parameters(), strict=True):
            assert_close(parameter.detach(), plain.detach())
            assert parameter.is_contiguous()
            for each in (parameter, plain):
                with torch.no_grad():
                    each.mul_(torch.arange(each.numel()).view(each.shape) % 3)
                if each.grad is not None:
                    each.grad.mul_(2)
    assert_same_parameters(model, expected)
    assert_same_gradients(model, expected)


@on_ranks(2)
def test_a_model_converted_or_assigned_to_keeps_its_placements(world_size):
    model, expected = compiled(varied(), shard_placement_fn=last), varied()
    for each in (model, expected):
        state = {"experts": torch.full_like(each.experts.detach(), 0.25)}
        each.load_state_dict(state, strict=False, assign=True)
    assert_trains_as(model, expected, range(2))
    model.double()
    batch = [tensor.double() for tensor in batch_of_rank(model, 0)]
    model(*batch).backward()
    assert model.experts.grad.dtype == torch.float64 and model.experts.grad.placements == (Shard(2),)


# Refusals


class Elsewhere:
    """As torch's private ShardPlacementResult, but for its mesh."""

    placement, mesh_info = None, "everywhere"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda parameter: Shard(0), "for scale, which has no dimension to shard"),
        (lambda parameter: Shard(1) if parameter.dim() else None, r"first\.bias, whose shape is \(8,\): its dim"),
        (lambda parameter: Shard(-2) if parameter.dim() else None, r"first\.bias, whose shape is \(8,\): its dim"),
        (lambda parameter: Replicate(), r"returned Replicate\(\) for .*: it returns a Shard\(dim\)"),
        (lambda parameter: 1, r"returned 1 for .*: it returns a Shard\(dim\)"),
        (lambda parameter: Elsewhere(), r"mesh_info 'everywhere' for experts: that is an FSDPMeshInfo or HSDP"),
        (lambda: None, r"shard_placement_fn: .* is called as \(parameter\)"),
        (Shard(0), "shard_placement_fn is a function that takes a parameter"),
        (nn.Linear(2, 2), "shard_placement_fn is a function that takes a parameter"),
    ],
)
def test_what_is_no_placement_is_refused_before_anything_is_changed(place, words):
    model = varied()
    with pytest.raises(ConfigError, match=words):
        shard(model, shard_placement_fn=place)
    assert not any("_fsdp" in name for module in model.modules() for name in vars(module))


@on_ranks(2)
def test_ranks_that_place_a_parameter_differently_are_told(world_size):
    with pytest.raises(RankError, match="sharded on dimension 2"):
        shard(varied(), shard_placement_fn=(first, last)[dist.get_rank()])


def test_a_single_process_shards_nothing():
    model, expected = compiled(varied(), shard_placement_fn=last), varied()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert torch.equal(model(*expected.inputs(4, 0)), expected(*expected.inputs(4, 0)))
