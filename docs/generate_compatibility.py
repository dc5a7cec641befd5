"""Write docs/compatibility.md from the list below: python docs/generate_compatibility.py.

A case is what a test of ours shows, named as `file::function` under tests/; rendering fails where one does not exist.
What is said of FSDP1 and FSDP2 was run with torch 2.13.0 on two gloo ranks, unless it says where else it is from.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "compatibility.md"
TESTS = ROOT / "tests"

YES = "yes"
DOCUMENTED = "yes (documented)"
NOT_CHECKED = "not checked"
WRONG = "**silently wrong**"


@dataclass(frozen=True)
class Case:
    """A row: what a script does, what becomes of it with each of the three, and the tests that show it for ours."""

    name: str
    fsdp1: str
    fsdp2: str
    tests: tuple[str, ...]
    result: str = YES


def case(name: str, fsdp1: str, fsdp2: str, *tests: str, result: str = YES) -> Case:
    return Case(name, fsdp1, fsdp2, tests, result)


def no(what: str) -> str:
    return f"no: {what}"


MIXED = no("RuntimeError: mixed torch.Tensor and DTensor")

SECTIONS: dict[str, list[Case]] = {
    "Training": [
        case(
            "losses and parameters of the unsharded model, units of transformer blocks",
            YES,
            YES,
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "rows that the number of ranks does not divide; fewer rows than ranks",
            YES,
            YES,
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "several forwards before a backward; several backwards before a step",
            YES,
            YES,
            "distributed/test_training.py::test_two_forwards_before_two_backwards",
            "distributed/test_accumulation.py::test_four_micro_batches_equal_one_large_batch",
        ),
        case(
            "nested inputs and outputs, keyword arguments",
            YES,
            YES,
            "distributed/test_programs.py::test_nested_inputs_and_outputs_of_any_class",
        ),
        case("gradients of the inputs", YES, YES, "distributed/test_training.py::test_gradients_reach_the_inputs"),
        case(
            "a module that is called twice",
            YES,
            YES,
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "another branch, and so another order of units, in the next step",
            YES,
            YES,
            "distributed/test_training.py::test_a_parameter_gets_a_gradient_in_the_steps_that_use_it",
        ),
        case(
            "a batch of another size",
            YES,
            YES,
            "distributed/test_dynamic.py::test_eight_batch_sizes_and_four_lengths_take_three_compilations",
        ),
        case(
            "an unused parameter keeps the gradient None",
            no("zeros on the ranks that hold it"),
            YES,
            "distributed/test_equality.py::test_without_generated_code_gradients_are_those_of_eager_to_the_last_bit",
        ),
        case(
            "BatchNorm: gradients and running statistics",
            YES,
            YES,
            "distributed/test_equality.py::test_training_with_batch_norm_equals_replicas_with_averaged_gradients",
        ),
        case(
            "ParameterList and ParameterDict",
            YES + " (in the root)",
            YES + " (in the root)",
            "distributed/test_modules.py::test_training_and_evaluation_equal_the_unsharded_model",
        ),
        case(
            "TransformerEncoderLayer",
            YES,
            YES,
            "distributed/test_modules.py::test_training_and_evaluation_equal_the_unsharded_model",
        ),
        case(
            "double backward",
            no("RuntimeError: setStorage"),
            no("RuntimeError: setStorage"),
            result=no("the compiled backward has none"),
        ),
    ],
    "Where parameters are read": [
        case(
            "a unit's weight is read by another module's forward",
            no("RuntimeError: size mismatch"),
            MIXED,
            "distributed/test_peers.py::test_a_parameter_is_gathered_wherever_it_is_read",
        ),
        case(
            "a method of a unit other than its forward",
            no("RuntimeError: mat2 must be a matrix"),
            MIXED + "; register_fsdp_forward_method",
            "distributed/test_peers.py::test_a_parameter_is_gathered_wherever_it_is_read",
        ),
        case(
            "a unit returns an object of a class of its own",
            no("RuntimeError: setStorage"),
            no("RuntimeError: setStorage"),
            "distributed/test_peers.py::test_a_parameter_is_gathered_wherever_it_is_read",
        ),
        case(
            "the model returns an object of a class of its own",
            no("ValueError in the backward"),
            YES,
            "distributed/test_peers.py::test_a_model_returns_an_object_of_any_class",
        ),
        case(
            "tied weights in one unit",
            YES,
            YES,
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "tied weights in two units",
            no("RuntimeError: size mismatch"),
            no("ValueError"),
            "distributed/test_compat.py::test_tied_weights_across_units_stay_one_weight",
            "distributed/test_sharding.py::test_tied_parameters_stay_one_object",
        ),
    ],
    "What parameters may be": [
        case(
            "0-d",
            no("ValueError"),
            no("ValueError"),
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "non-contiguous",
            YES,
            no("NotImplementedError"),
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "trained ones of two dtypes in a unit",
            no("ValueError"),
            no("AssertionError"),
            "distributed/test_peers.py::test_one_unit_holds_trained_parameters_of_two_dtypes",
        ),
        case(
            "frozen bf16 and trained fp32 in a unit, as adapters are",
            no("ValueError"),
            YES,
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
        case(
            "ignored parameters stay as they are",
            YES,
            YES,
            "distributed/test_init.py::test_ignored_parameters_are_left_alone",
        ),
    ],
    "Units and strategies": [
        case(
            "without a policy, repeated blocks are units",
            no("one unit"),
            no("one unit"),
            "distributed/test_peers.py::test_repeated_blocks_are_units_when_none_are_named",
        ),
        case(
            "policies of torch.distributed.fsdp.wrap",
            DOCUMENTED,
            no("units are marked one by one"),
            "distributed/test_units.py::test_every_kind_of_policy_trains_equal",
        ),
        case(
            "FULL_SHARD and SHARD_GRAD_OP",
            YES,
            YES,
            "distributed/test_strategies.py::test_shard_grad_op_gathers_each_unit_once",
        ),
        case(
            "NO_SHARD",
            YES,
            no("no such option"),
            "distributed/test_strategies.py::test_no_shard_keeps_parameters_whole_and_reduces_each_bucket_once",
        ),
        case(
            "hybrid sharding on a mesh of two dimensions",
            DOCUMENTED,
            DOCUMENTED,
            "distributed/test_strategies.py::test_hybrid_strategies_on_a_mesh",
        ),
        case(
            "a smaller group of ranks to gather the backward from",
            no("no such option"),
            DOCUMENTED,
            "distributed/test_strategies.py::test_a_number_of_ranks_gathers_the_backward_over_groups_of_that_size",
        ),
        case(
            "some of the ranks only",
            YES,
            YES,
            "distributed/test_strategies.py::test_sharding_over_some_of_the_ranks",
        ),
        case(
            "a rank holds one Nth of the bytes",
            DOCUMENTED,
            DOCUMENTED,
            "distributed/test_sharding.py::test_a_rank_holds_one_nth_of_the_bytes",
        ),
        case(
            "different values on every rank before sharding",
            f"{WRONG} unless sync_module_states",
            WRONG,
            "distributed/test_sharding.py::test_values_come_from_rank_0",
        ),
        case(
            "a model on the meta device",
            YES,
            YES,
            "distributed/test_checkpoint.py::test_a_model_made_on_the_meta_device_is_filled_from_rank_0",
            "distributed/test_init.py::test_param_init_fn_gives_a_model_on_the_meta_device_its_values",
        ),
        case(
            "offload to the CPU",
            DOCUMENTED,
            DOCUMENTED,
            "distributed/test_init.py::test_offloading_without_an_accelerator_is_the_same_graph",
        ),
    ],
    "Mixed precision": [
        case(
            "bf16 gathers, fp32 reductions and masters",
            YES,
            YES,
            "distributed/test_mixed_precision.py::test_training_equals_bf16_copies_with_averaged_gradients",
            "distributed/test_mixed_precision.py::test_gathers_move_half_the_bytes_and_losses_track_fp32",
        ),
        case(
            "modules of some classes stay in fp32",
            YES,
            no("a policy a module"),
            "distributed/test_mixed_precision.py::test_norms_stay_in_fp32_by_class_and_units_have_policies_of_their_own",
        ),
        case(
            "torch.amp.GradScaler, a gradient overflows on one rank",
            f"{WRONG}: scales differ; ShardedGradScaler",
            YES,
            "distributed/test_mixed_precision.py::test_a_gradient_scaler_skips_a_step_on_all_ranks_if_one_overflows",
        ),
        case(
            "`.to(dtype)` after a step",
            no("ValueError"),
            no("RuntimeError"),
            "distributed/test_state.py::test_a_model_converted_after_sharding",
        ),
    ],
    "Gradients and optimizers": [
        case(
            "micro-batches without communication, then one reduction",
            YES,
            YES,
            "distributed/test_accumulation.py::test_four_micro_batches_equal_one_large_batch",
            "distributed/test_accumulation.py::test_no_sync_reduces_once_and_otherwise_every_micro_batch_does",
        ),
        case(
            "freezing and unfreezing in mid-training",
            YES + " (use_orig_params)",
            YES,
            "distributed/test_freezing.py::test_freezing_and_unfreezing_at_any_time",
        ),
        case(
            "nothing is reduced for frozen parameters of a unit that trains",
            no("the whole unit is"),
            YES,
            "distributed/test_freezing.py::test_what_is_frozen_is_not_reduced_and_nothing_is_computed_for_it",
        ),
        case(
            "an optimizer built before sharding",
            f"{WRONG} unless use_orig_params",
            WRONG,
            "distributed/test_optimizers.py::test_an_optimizer_built_before_sharding_trains_the_model",
        ),
        case(
            "optimizers in post-accumulate-grad hooks",
            WRONG,
            YES,
            "distributed/test_training.py::test_hooks_of_the_user_run_on_the_parameters",
        ),
        case(
            "torch.nn.utils.clip_grad_norm_",
            f"{WRONG}: each rank its own norm",
            YES,
            "distributed/test_optimizers.py::test_clip_grad_norm_equals_the_unsharded_models",
        ),
        case(
            "`model.clip_grad_norm_`, a plain tensor as the result",
            YES,
            no("AttributeError"),
            "distributed/test_clipping.py::test_clipping_equals_the_unsharded_models",
        ),
        case(
            "clipping sharded and plain parameters together",
            NOT_CHECKED,
            MIXED,
            "distributed/test_clipping.py::test_plain_parameters_of_a_sharded_model_count_once",
        ),
        case(
            "gradients divided by a number of one's own",
            no("no such option"),
            no("RuntimeError on gloo"),
            "distributed/test_strategies.py::test_gradients_are_summed_or_divided_by_a_number",
        ),
    ],
    "State": [
        case(
            "`named_parameters` has the original names",
            no("`_fsdp_wrapped_module.`"),
            YES,
            "distributed/test_sharding.py::test_parameters_are_dtensors_with_the_original_names_and_values",
        ),
        case(
            "`state_dict` has the original names after compilation",
            no("`_orig_mod.` after torch.compile(model)"),
            no("`_orig_mod.` after torch.compile(model)"),
            "distributed/test_checkpoint.py::test_names_are_those_of_the_unsharded_model_after_compiled_steps",
        ),
        case(
            "a checkpoint of model and optimizer with torch.distributed.checkpoint",
            YES,
            YES,
            "distributed/test_state.py::test_training_goes_on_from_a_checkpoint_of_model_and_optimizer",
        ),
        case(
            "the same where a rank holds nothing of some parameters",
            no("CheckpointException"),
            YES,
            "distributed/test_checkpoint.py::test_a_checkpoint_of_two_ranks_on_other_numbers_of_ranks",
        ),
        case(
            "loaded on another number of ranks",
            DOCUMENTED,
            DOCUMENTED,
            "distributed/test_checkpoint.py::test_a_checkpoint_of_two_ranks_on_other_numbers_of_ranks",
            "distributed/test_checkpoint.py::test_a_checkpoint_of_three_ranks_on_a_hybrid_mesh_and_without_sharding",
        ),
        case(
            "a full state dict by get_model_state_dict",
            YES,
            YES,
            "distributed/test_checkpoint.py::test_a_full_state_goes_to_rank_0_and_comes_back_from_it",
        ),
        case(
            "`load_state_dict` of a full state dict",
            YES,
            MIXED,
            "distributed/test_full_parameters.py::test_a_full_state_dict_loads_on_every_rank",
        ),
        case(
            "`summon_full_params`",
            YES,
            no("AttributeError"),
            "distributed/test_full_parameters.py::test_parameters_are_full_inside_and_the_sharded_ones_afterwards",
        ),
        case(
            "copy.deepcopy of the model",
            no("TypeError"),
            no("AssertionError"),
            "distributed/test_state.py::test_a_deep_copy_is_another_model",
        ),
        case(
            "AveragedModel",
            no("TypeError"),
            no("AssertionError"),
            "distributed/test_saving.py::test_an_averaged_model_equals_the_unsharded_one",
        ),
        case(
            "torch.save of the model",
            no("TypeError"),
            no("PicklingError"),
            "distributed/test_saving.py::test_a_model_from_a_file_trains_on_as_the_one_that_was_saved",
        ),
    ],
    "Modes, recompute and compilation": [
        case(
            "calls without gradients between steps",
            YES,
            YES,
            "distributed/test_training.py::test_calls_without_gradients_between_steps",
        ),
        case(
            "a first call in inference_mode, then training",
            no("AssertionError"),
            no("RuntimeError"),
            "distributed/test_modules.py::test_training_and_evaluation_equal_the_unsharded_model",
        ),
        case(
            "torch.utils.checkpoint of both kinds, and selective policies",
            YES,
            YES,
            "distributed/test_checkpointing.py::test_a_checkpointed_model_trains",
            "distributed/test_checkpointing.py::test_a_selective_policy_decides_what_is_saved",
        ),
        case(
            "composable checkpointing (torch.distributed._composable), compiled",
            NOT_CHECKED,
            NOT_CHECKED,
            "distributed/test_checkpointing.py::test_modules_with_composable_checkpointing_train",
        ),
        case(
            "dropout under activation_memory_budget < 1",
            WRONG,
            WRONG,
            "distributed/test_checkpointing.py::test_random_numbers_are_those_of_the_unsharded_model",
            "distributed/test_checkpointing.py::test_inductor_recomputes_with_the_mask_of_the_forward",
        ),
        case(
            "nn.LSTM",
            YES,
            YES,
            "distributed/test_modules.py::test_training_and_evaluation_equal_the_unsharded_model",
        ),
        case(
            "torch.compile of all of it as one graph (fullgraph=True)",
            no("Unsupported"),
            no("Unsupported"),
            "distributed/test_training.py::test_fullgraph_compiles_one_graph_and_refuses_a_break",
        ),
        case(
            "forward and backward run no hook of a module and dispatch no DTensor operation",
            no("hooks of every unit"),
            no("hooks of every unit"),
            "distributed/test_peers.py::test_forward_and_backward_dispatch_no_dtensor_operation_and_run_no_hook",
        ),
        case(
            "an exception in the middle of a step, then the next step",
            YES,
            YES,
            "distributed/test_accumulation.py::test_evaluation_an_exception_and_two_losses_in_between",
        ),
        case(
            "a graph break in the model",
            YES,
            YES,
            "distributed/test_equality.py::test_training_equals_the_unsharded_model",
        ),
    ],
    "Libraries": [
        case(
            "Llama and GPT-2 of transformers, unmodified, saved for `from_pretrained`",
            NOT_CHECKED,
            NOT_CHECKED,
            "test_transformers.py::test_training_equals_the_unsharded_model",
            "test_transformers.py::test_from_pretrained_loads_what_was_saved",
        ),
        case(
            "LoRA of peft; nothing is reduced for frozen weights",
            NOT_CHECKED,
            NOT_CHECKED,
            "test_transformers.py::test_adapters_train_as_in_the_unsharded_model",
            "test_transformers.py::test_frozen_weights_are_gathered_and_never_reduced",
        ),
    ],
    "A change of the import": [
        case(
            "`fully_shard` from the bottom up",
            no("another interface"),
            YES,
            "distributed/test_compat.py::test_fully_shard_from_the_bottom_up_is_one_program",
            "test_examples.py::test_a_script_for_fsdp2_has_the_same_losses_with_both_imports",
        ),
        case(
            "a list of modules as one unit",
            no("another interface"),
            YES + " (documented)",
            "distributed/test_compat.py::test_a_list_of_modules_is_one_unit",
            "distributed/test_compat.py::test_parts_of_modules_in_a_list_keep_their_units",
        ),
        case(
            "`FullyShardedDataParallel`, today's signature and that of torch 1.11",
            YES + " (today's)",
            no("another interface"),
            "distributed/test_compat.py::test_fully_sharded_data_parallel_by_every_signature",
        ),
    ],
}

HEAD = """\
<!-- Generated by docs/generate_compatibility.py; a test keeps it fresh. -->

# Compatibility

What training scripts do, and what becomes of it. The cases follow torch's own suites for FSDP1
(`FullyShardedDataParallel`, with `use_orig_params=True`) and FSDP2 (`fully_shard`), and what their users have reported.
What is said of these two was run with torch 2.13.0 on two CPU ranks with gloo, against the unsharded model.
"Documented" is what torch's documentation says, "not checked" what nobody has looked at, and
"silently wrong" another result without an error. For fsdp_compile every "yes" names the tests that show it.\
"""


def render() -> str:
    """The text of docs/compatibility.md."""
    missing = missing_tests()
    if missing:
        raise LookupError(f"there is no test {', '.join(missing)}")
    sections = [HEAD, *(_section(title, cases) for title, cases in SECTIONS.items())]
    return "\n\n".join(sections) + "\n"


def missing_tests() -> list[str]:
    """The tests that are named in the table and not in the tree."""
    named = sorted({test for cases in SECTIONS.values() for case in cases for test in case.tests})
    found = {file: _functions(TESTS / file) for file in {test.partition("::")[0] for test in named}}
    return [test for test in named if test.partition("::")[2] not in found[test.partition("::")[0]]]


def _functions(file: Path) -> set[str]:
    if not file.exists():
        return set()
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def _section(title: str, cases: list[Case]) -> str:
    rows = [f"## {title}", "", "| case | FSDP1 | FSDP2 | fsdp_compile |", "| --- | --- | --- | --- |"]
    for found in cases:
        ours = "<br>".join([found.result, *(_link(test) for test in found.tests)])
        rows.append(f"| {found.name} | {found.fsdp1} | {found.fsdp2} | {ours} |")
    return "\n".join(rows)


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{file})"


if __name__ == "__main__":
    TARGET.write_text(render())
