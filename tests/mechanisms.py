"""Tests of how the engine that lends memory does what it does.

They say nothing of stages under torch's own autograd (`SHARDFN_STAGE=autograd`), with which they are left out. All
others judge both engines alike: gradients of every strategy and option beside one process, the matrix of transforms,
collectives and their order, random programs, the gallery.
"""

from __future__ import annotations

import os

import pytest

LENT = {
    # slots, and what is in them when
    "tests/stages/test_residency.py", "tests/stages/test_scratch.py", "tests/stages/test_stage_lent.py",
    # what is refused, since memory is lent or a stage has a graph of its own
    "tests/stages/test_stage_refusals.py::test_what_a_stage_must_not_do_is_refused",
    "tests/stages/test_stage_refusals.py::test_a_tensor_closed_over_that_needs_a_gradient_is_refused",
    "tests/stages/test_stage_refusals.py::test_a_stage_inside_a_stage_is_refused",
    "tests/stages/test_stage_refusals.py::test_a_leaf_that_a_stage_makes_is_refused_with_what_to_write",
    "tests/stages/test_stage_refusals.py::test_a_reentrant_checkpoint_in_a_stage_is_refused_by_the_stages_name",
    "tests/stages/test_stage_hidden.py::test_a_closure_that_starts_to_need_a_gradient_is_refused",
    "tests/stages/test_stage_hidden.py::test_an_activation_that_leaves_past_the_outputs_is_refused",
    "tests/stages/test_stage_hidden.py::test_tensors_that_hide_in_arguments_and_results_are_refused",
    "tests/stages/test_stage_ranks.py::test_what_would_be_silently_wrong_is_refused",
    "tests/stages/test_chaos.py::test_a_loss_of_what_escaped_is_refused",
    "tests/stages/test_chaos.py::test_lent_memory_is_nan_when_it_is_given_back",
    "tests/stages/test_offload.py::test_what_cannot_be_is_refused",
    # a parameter is a leaf of the stage's graph, whose requires_grad a function may change
    "tests/stages/test_second_runs.py::test_a_parameter_that_the_function_freezes_gets_no_gradient",
    "tests/stages/test_stage_ranks.py::test_what_a_function_does_to_its_parameters_lasts_for_that_call",
    # the schedule under torch.func, whose transforms take no hooks
    "tests/stages/test_offload.py::test_every_way_to_a_gradient_finds_them",
    "tests/stages/test_stage_refusals.py::test_after_an_exception_the_next_step_is_clean",
    # a second derivative runs nothing again, and sparse tensors are what they are to torch
    "tests/stages/test_stage_dtypes.py::test_what_runs_again_for_a_second_derivative_meets_the_autocast_of_forward[{}",
    "tests/stages/test_stage_refusals.py::test_arguments_that_make_no_sense_are_refused[sparse",
    # how often it decodes, and compares what is lent
    "tests/quant/test_packed.py::test_what_is_decoded_still_is_not_decoded_again",
    # when gathers start
    "tests/stages/test_overlap.py::test_a_gather_waits_for_no_stage_but_the_last_user_of_its_slot",
    "tests/stages/test_overlap.py::test_a_mesh_may_go_while_a_gather_that_nobody_needs_is_under_way",
    "tests/stages/test_overlap.py::test_a_missing_wait_of_a_gather_is_a_race",
    "tests/stages/test_overlap.py::test_only_gathers_whose_shards_changed_wait_for_them",
    "tests/stages/test_overlap.py::test_parameters_in_few_bits_are_gathered_as_early",
    "tests/stages/test_overlap.py::test_streams_do_not_meet_in_decoded_parameters",
    "tests/stages/test_stage_dtypes.py::test_the_buffers_of_a_stage_start_together_and_the_ledger_has_each",
    # the engine's own objects and counts
    "tests/stages/test_simulated.py::test_random_state_is_read_where_a_stage_may_run_again",
    "tests/stages/test_simulated.py::test_what_is_recomputed_on_another_thread_uses_the_same_engine",
    "tests/stages/test_offload.py::test_what_is_saved_several_times_moves_once",
    "tests/stages/test_stage_writes.py::test_a_shard_that_is_overwritten_before_backward_is_an_error",
}  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves them out with the other engine."""
    if os.environ.get("SHARDFN_STAGE") == "autograd":
        cases = tuple(test for test in LENT if "[" in test)
        out = [
            item
            for item in items
            if {(test := item.nodeid.split("[")[0]), test.split("::")[0]} & LENT or item.nodeid.startswith(cases)
        ]
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
