"""Every option is tested for its effect, or for its refusal; this walks the signatures and says where."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from fsdp_compile import CaptureError, ConfigError, compat, fsdp_compile, rewrite, shard
from tests.models import everything_of

TESTS = Path(__file__).parent
SHOWN_BY = {  # the test that fails if the option has no effect, or that shows that it is refused
    "model": "distributed/test_errors.py::test_something_that_is_no_module",
    "mesh": "distributed/test_meshes.py::test_a_mesh_of_one_dimension_shards_over_it",
    "process_group": "distributed/test_meshes.py::test_a_process_group_shards_over_its_ranks_only",
    "auto_wrap_policy": "distributed/test_units.py::test_policies_that_name_the_blocks_give_the_same_graphs",
    "sharding_strategy": "distributed/test_strategies.py::test_shard_grad_op_gathers_each_unit_once",
    "reshard_after_forward": "test_rewrite.py::test_reshard_after_forward_says_what_is_kept",
    "shard_placement_fn": "test_rewrite.py::test_parts_along_another_dimension_are_put_side_by_side",
    "mp_policy": "distributed/test_mixed_precision.py::test_gathers_move_half_the_bytes_and_losses_track_fp32",
    "communication_dtype": "passes/test_forms.py::test_the_last_glob_that_matches_a_unit_decides",
    "offload_policy": "passes/test_overlap_copies.py::test_a_shard_is_copied_one_unit_ahead_of_its_gather",
    "backward_prefetch": "distributed/test_choices.py::test_each_choice_changes_the_schedule",
    "forward_prefetch": "test_rewrite.py::test_forward_prefetch_starts_gathers_earlier",
    "collective_lowering": "test_rewrite.py::test_the_lowering_is_packed_or_grouped",
    "collective_pieces": "costs/test_model_collectives.py::test_pieces_run_beside_the_matmul_of_the_next",
    "memory_budget": "test_scheduling.py::test_time_rises_as_the_budget_shrinks_and_the_peak_obeys",
    "hardware": "test_scheduling.py::test_a_plan_is_never_slower_than_no_plan",
    "example_inputs": "distributed/test_strategies.py::test_auto_chooses_one_strategy_for_all_ranks_and_says_why",
    "ignored_params": "distributed/test_init.py::test_ignored_parameters_are_left_alone",
    "param_init_fn": "distributed/test_init.py::test_param_init_fn_gives_a_model_on_the_meta_device_its_values",
    "sync_module_states": "distributed/test_sharding.py::test_values_stay_the_ranks_own_on_request",
    "gradient_reduction": "distributed/test_strategies.py::test_gradients_are_summed_or_divided_by_a_number",
    "check_gradients": "distributed/test_guard.py::test_a_gradient_that_is_not_finite_is_named_on_every_rank",
    "passes": "distributed/test_passes.py::test_a_model_with_a_pass_of_the_user_trains_as_without",
    "backend": "distributed/test_errors.py::test_a_value_that_the_compiler_cannot_have",
    "fullgraph": "distributed/test_training.py::test_fullgraph_compiles_one_graph_and_refuses_a_break",
    "dynamic": "distributed/test_training.py::test_dynamic_says_whether_sizes_are_symbols",
    "options": "distributed/test_training.py::test_options_reach_inductor",
    "device": "test_rewrite.py::test_a_device_that_nothing_is_traced_for",
    "world_size": "test_rewrite.py::test_only_the_shards_depend_on_the_world_size",
    # of fully_shard and FullyShardedDataParallel only
    "module": "distributed/test_compat.py::test_unsupported_arguments_raise_and_change_nothing",
    "cpu_offload": "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
    "fsdp_auto_wrap_policy": "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
    "use_orig_params": "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
    "mixed_precision": "distributed/test_compat.py::test_mixed_precision_of_fsdp1_keeps_batch_norm_in_fp32",
    "ignored_modules": "distributed/test_compat.py::test_ignored_modules_and_states",
    "ignored_states": "distributed/test_compat.py::test_ignored_modules_and_states",
    "limit_all_gathers": "distributed/test_compat.py::test_unsupported_arguments_raise_and_change_nothing",
    "device_id": "distributed/test_compat.py::test_arguments_of_fsdp1_that_name_a_device_and_a_mesh",
    "device_mesh": "distributed/test_compat.py::test_arguments_of_fsdp1_that_name_a_device_and_a_mesh",
    "dp_mesh_dims": "distributed/test_data_dims.py::test_it_trains_as_torchs_own_and_as_the_whole_model",
}
FUNCTIONS = [fsdp_compile, shard, rewrite, compat.fully_shard, compat.FullyShardedDataParallel.__new__]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_every_option_has_a_test(function):
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    options = {parameter.name for parameter in parameters if parameter.kind not in variadic} - {"cls"}
    assert options <= set(SHOWN_BY), f"no test is named for {sorted(options - set(SHOWN_BY))}"


@pytest.mark.parametrize("test", sorted(set(SHOWN_BY.values())))
def test_the_named_test_exists(test):
    file, _, name = test.partition("::")
    names = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(node, ast.FunctionDef)}
    assert name in names


class Odd:
    """It cannot be hashed, compared, or asked whether it is true."""

    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("an odd value was compared")

    def __bool__(self):
        raise RuntimeError("an odd value was asked whether it is true")


def odd_values():
    """Of every type that might be given by mistake; some have a meaning for some option."""
    yield from ([], [1], [None], [[]], (), (1, 2), {}, {"a": 1}, {"*": [1]}, {1: 1}, set(), iter([]), iter([1]))
    yield from (0, 1, -1, 2**70, 10**400, 1.5, 1j, float("nan"), float("inf"), True, False, None)
    yield from ("", "odd", "\0", "x" * 5000, b"x", "9" * 400 + " GiB", torch.float32, torch.device("cpu"))
    yield from (np.int64(1), np.float64("nan"), np.bool_(True), np.ones(2), torch.tensor(1.0), torch.ones(2))
    yield from (int, nn.Linear, ModuleWrapPolicy, MixedPrecisionPolicy, CPUOffloadPolicy, ShardingStrategy)
    yield from (object(), Odd(), BackwardPrefetch, nn.Linear(2, 2), nn.Parameter(torch.ones(2)))
    yield from (lambda: True, lambda module: None, lambda module, recurse: True, CustomPolicy(lambda: True))
    yield from (CustomPolicy(3), ModuleWrapPolicy(set()), MixedPrecisionPolicy(param_dtype="bf16"))
    yield from (MixedPrecisionPolicy(torch.int8), MixedPrecisionPolicy(cast_forward_inputs=3))
    yield from ({"": MixedPrecisionPolicy(output_dtype=3)}, MixedPrecision("bf16"), MixedPrecision(buffer_dtype=3))
    yield from (MixedPrecision(_module_classes_to_ignore=[3]), CPUOffloadPolicy(pin_memory=3))
    yield from (CPUOffload(offload_params="yes"), {"max_autotune": "x"}, {"cpp.threads": 1.5}, {"max-fusion": 1})


def options_of(function):
    named = [option for option, each in inspect.signature(function).parameters.items() if each.kind not in VARIADIC]
    return [option for option in named if option not in ("cls", "model", "module")]


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
NEEDED = {  # by other options, to have a meaning
    "memory_budget": {"hardware": "h100"},
    "example_inputs": {"sharding_strategy": "auto", "hardware": "h100"},
}
ALSO_CALLED = {"fsdp_auto_wrap_policy": "auto_wrap_policy"}  # what errors say of an option


def tiny():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model.register_buffer("buffer", torch.ones(2))
    return model


ONE_OF_A_LIST = "fully_shard of a list"


@pytest.mark.parametrize(
    ("function", "option"),
    [
        pytest.param(each, option, id=f"{each.__qualname__}-{option}")
        for each in FUNCTIONS
        for option in options_of(each)
    ]
    + [pytest.param(ONE_OF_A_LIST, option, id=f"list-{option}") for option in options_of(compat.fully_shard)],
)
def test_an_odd_value_works_or_is_refused_by_name(two_ranks, function, option):
    for value in odd_values():
        if option == "device_id" and isinstance(value, int) and value in (0, 1):
            continue  # a GPU, where there is one
        if option == "sharding_strategy" and isinstance(value, CPUOffload):
            continue  # what torch 1.11 has in this place
        model = tiny()
        before = everything_of(model)
        try:
            called = call(function, model, {**NEEDED.get(option, {}), option: value})
        except (ConfigError, CaptureError) as e:
            assert ALSO_CALLED.get(option, option) in str(e), value
            assert isinstance(e, ConfigError) or option == "example_inputs", value
            assert everything_of(model) == before, value
        else:
            if called is not None:
                called(torch.ones(2, 3)).sum().backward()


def call(function, model, options):
    """What can be called then, without being compiled."""
    if function is ONE_OF_A_LIST:
        compat.fully_shard(list(model), **options)
        return None
    if function is rewrite:
        rewrite(model, torch.ones(2, 3), **{"world_size": 2, **options})
        return None
    if function is FUNCTIONS[-1]:
        function = compat.FullyShardedDataParallel
    sharded = function(model, **options)
    return sharded if function is shard and "example_inputs" not in options else None


def test_options_of_inductor_have_either_spelling():
    model = fsdp_compile(tiny(), options={"max-fusion-size": 8})
    model(torch.ones(2, 3)).sum().backward()
    for name in ("reorder-for-locality", "reorder_for_locality"):
        with pytest.raises(ConfigError, match=f"options: {name} would undo the schedule"):
            fsdp_compile(tiny(), options={name: True})


@pytest.mark.parametrize("policy", [lambda module, recurse, unwrapped: False, nn.Linear(2, 2).forward])
def test_a_policy_of_another_signature_is_told_which_is_called(policy):
    with pytest.raises(ConfigError, match=r"auto_wrap_policy: .*\(module=\.\.\., recurse=\.\.\., nonwrapped_numel"):
        shard(tiny(), auto_wrap_policy=policy)


def test_an_iterator_serves_every_strategy_that_is_tried():
    model, hardware = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "h100"
    options = {"world_size": 64, "sharding_strategy": "auto", "hardware": hardware, "memory_budget": "100 KB"}
    found = rewrite(model, torch.ones(1, 64), auto_wrap_policy=iter(["0", "1"]), **options)
    assert str(found) == str(rewrite(model, torch.ones(1, 64), auto_wrap_policy=["0", "1"], **options))
    assert "all_gather(0" in str(found)


@pytest.mark.parametrize("function", [fsdp_compile, shard])
def test_a_misspelled_option_is_told_what_may_be_meant(function):
    model = nn.Linear(3, 3)
    before = everything_of(model)
    with pytest.raises(
        TypeError, match=rf"^{function.__name__}\(\) .*'shardingstrategy': did you mean 'sharding_strategy'"
    ):
        function(model, shardingstrategy="FULL_SHARD")
    assert everything_of(model) == before
