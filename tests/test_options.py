"""Every option is tested for its effect, or for its refusal; this walks the signatures and says where."""

import ast
import inspect
from pathlib import Path

import pytest

from fsdp_compile import compat, fsdp_compile, rewrite, shard

TESTS = Path(__file__).parent
SHOWN_BY = {  # the test that fails if the option has no effect, or that shows that it is refused
    "model": "distributed/test_errors.py::test_something_that_is_no_module",
    "mesh": "distributed/test_meshes.py::test_a_mesh_of_one_dimension_shards_over_it",
    "process_group": "distributed/test_meshes.py::test_a_process_group_shards_over_its_ranks_only",
    "auto_wrap_policy": "distributed/test_units.py::test_policies_that_name_the_blocks_give_the_same_graphs",
    "sharding_strategy": "distributed/test_strategies.py::test_shard_grad_op_gathers_each_unit_once",
    "reshard_after_forward": "test_rewrite.py::test_reshard_after_forward_says_what_is_kept",
    "mp_policy": "distributed/test_mixed_precision.py::test_gathers_move_half_the_bytes_and_losses_track_fp32",
    "offload_policy": "passes/test_offload.py::test_a_shard_is_copied_to_the_device_one_unit_ahead_of_its_gather",
    "backward_prefetch": "distributed/test_choices.py::test_each_choice_changes_the_schedule",
    "forward_prefetch": "test_rewrite.py::test_forward_prefetch_starts_gathers_earlier",
    "collective_lowering": "test_rewrite.py::test_the_lowering_is_packed_or_grouped",
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
    "world_size": "test_rewrite.py::test_only_the_shards_depend_on_the_world_size",
    # of fully_shard and FullyShardedDataParallel only
    "module": "distributed/test_compat.py::test_unsupported_arguments_raise_and_change_nothing",
    "shard_placement_fn": "distributed/test_compat.py::test_unsupported_arguments_raise_and_change_nothing",
    "cpu_offload": "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
    "fsdp_auto_wrap_policy": "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
    "use_orig_params": "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
    "mixed_precision": "distributed/test_compat.py::test_mixed_precision_of_fsdp1_keeps_batch_norm_in_fp32",
    "ignored_modules": "distributed/test_compat.py::test_ignored_modules_and_states",
    "ignored_states": "distributed/test_compat.py::test_ignored_modules_and_states",
    "limit_all_gathers": "distributed/test_compat.py::test_unsupported_arguments_raise_and_change_nothing",
    "device_id": "distributed/test_compat.py::test_arguments_of_fsdp1_that_name_a_device_and_a_mesh",
    "device_mesh": "distributed/test_compat.py::test_arguments_of_fsdp1_that_name_a_device_and_a_mesh",
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
