"""Mechanisms broken on purpose, each with the test that must then fail.

`python -m tests.mutants [--only NAME ...] [--workers 2]` copies the project, breaks one mechanism at a time, runs its
test on the copy, and prints a table. A mutant that survives shows an error that no test would notice. A test that hangs
does not count as a failure, unless it has its own deadline.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Mutant:
    """One change of the source.

    Attributes:
        name: a description of the error.
        file: the file's path in `shardfn`.
        old: a text that occurs exactly once in the file.
        new: the text that replaces it.
        test: the test that must fail, as an argument of pytest.
    """

    name: str
    file: str
    old: str
    new: str
    test: str


CHAOS = "tests/stages/test_chaos.py::test_training_is_that_of_one_process_whatever_the_timing"
TWO, FOUR = f"{CHAOS}[2-1-12]", f"{CHAOS}[4-1-8]"
GRADIENTS = "tests/shards/test_strategies.py::test_gradients_are_those_of_one_process"
RANKS = "tests/stages/test_stage_ranks.py"
TRAPS = "tests/stages/test_traps.py"
SENT = "tests/stages/test_gradients_sent.py"
REFUSALS = "tests/stages/test_stage_refusals.py"
DTYPES = "tests/stages/test_stage_dtypes.py"
OWN = "tests/stages/test_chaos.py"
CURVATURE = "tests/curvature/test_curvature.py"
INFLUENCE = "tests/curvature/test_influence.py"
FORWARD = "tests/stages/test_forward_mode.py"
ZEROS = "tests/shards/test_strategies.py::test_gradients_have_zeros_where_no_parameter_is"
NARROW = "tests/shards/test_strategies.py::test_gradients_in_narrow_dtypes_are_rounded_once"
COLLECTIVES = "tests/collectives/test_collectives.py"
BITS = f"{COLLECTIVES}::test_a_sum_has_the_same_bits_on_all_ranks_and_narrow_numbers_are_rounded_once"
PIPELINES = "tests/parallel/test_pipeline.py"
OPTIMIZERS = "tests/optim/test_optim.py"
ACCUMULATE = "tests/transforms/test_accumulate.py"

TRANSFERS = "tests/tiers/test_transfers.py"
RUN = "tests/run"
FITTING = "tests/transforms/test_fitting.py"
COMPILED = "tests/transforms/test_compiled.py"
AS_IT_IS = f"{COMPILED}::test_a_program_has_the_numbers_and_messages_of_the_step"
WRONG = "tests/check/test_wrong.py::test_every_rank_hears_what_is_wrong_and_where_and_what_to_write"
RIGHT = "tests/check/test_right.py::test_a_right_program_passes_in_silence_and_unchanged"

CHANGES: dict[str, dict[str, tuple[str, str, str]]] = {
    "mesh/exact.py": {
        "parts in the order of their rows": (
            "leaves = [leaf + digit * stride for digit in range(base) for leaf in leaves]",
            "leaves = sorted(leaf + digit * stride for digit in range(base) for leaf in leaves)",
            "tests/transforms/test_exact.py::test_bits_are_those_of_one_process[stages]",
        ),
    },
    "mesh/scope.py": {
        "autograd's threads know no part": (
            "    return parts.get(axes.lane)",
            "    return None",
            "tests/transforms/test_exact.py::test_what_runs_again_on_a_thread_of_autograd_knows_its_part[checkpoint]",
        ),
    },
    "transforms/exact.py": {
        "a part is a view of the batch": (
            ".clone(memory_format=torch.contiguous_format) for x in batch.tensors]",
            " for x in batch.tensors]",
            "tests/transforms/test_exact.py::test_the_rows_of_a_part_are_aligned_in_memory_of_their_own",
        ),
    },
    "forward_mode/pairs.py": {
        "a product loses what goes through a closure": (
            "ct if need else None for ct, need in closed_over",
            "None for ct, need in closed_over",
            f"{TRAPS}::test_stages_in_each_other",
        ),
        "cotangents lose their tangents": (
            "functorch.dual(value.detach(), tangent.detach())",
            "value.detach()",
            f"{FORWARD}::test_products_are_those_of_torch",
        ),
        "a stage that torch.func refuses draws other numbers": (
            "        began.restore()\n",
            "",
            f"{FORWARD}::test_what_torch_func_refuses_has_products_too",
        ),
        "the graph of a stage has tangents": (
            "torch.is_grad_enabled() and signature.reverses\n",
            "torch.is_grad_enabled() and not signature.reverses\n",
            f"{FORWARD}::test_what_a_stage_saves_is_let_go_as_in_a_gradient",
        ),
        "a product with a Hessian reads results that were written into": (
            "if y._version != n}",
            "if y._version < n}",
            f"{FORWARD}::test_an_index_that_a_stage_returned_is_not_written_into_while_its_gradient_reads_it",
        ),
        "a value that is returned is a parameter's": (
            "functorch.unpacked(y)[0]) in storages else y",
            "functorch.unpacked(y)[0]) in () else y",
            f"{FORWARD}::test_results_of_pairs_are_no_memory_of_parameters",
        ),
        "the gradient of a tangent is lost": (
            "        if cotangent is not None:\n            raise",
            "        if False:\n            raise",
            f"{FORWARD}::test_the_gradient_of_a_tangent_that_is_unpacked_is_refused",
        ),
        "gradients of pairs are taken without a graph": (
            "create_graph=True, allow_unused=True",
            "create_graph=False, allow_unused=True",
            f"{FORWARD}::test_products_are_those_of_torch[solving]",
        ),
        "pairs lose that they are conjugates": (
            "if marked or (value",
            "if (value",
            f"{FORWARD}::test_each_order_and_choice_of_derivatives",
        ),
        "gradients that nobody reads are computed": (
            "unread = tuple(all(id(leaves[i]) in variables for i in source) for source in signature.sources)",
            "unread = tuple(False for source in signature.sources)",
            "tests/curvature/test_operators.py::test_a_product_computes_and_reduces_tangents_of_gradients_alone",
        ),
        "parameters that are computed have no gradients either": (
            "unread = tuple(all(id(leaves[i]) in variables for i in source) for source in signature.sources)",
            "unread = tuple(bool(variables) for source in signature.sources)",
            "tests/curvature/test_operators.py::test_gradients_that_nobody_reads_are_in_no_product[products-False]",
        ),
    },
    "compat/blockwise_attention.py": {
        "rows of a later block of attention see as few as the first": (
            "torch.arange(rows.start, rows.stop, device=scores.device)",
            "torch.arange(rows.stop - rows.start, device=scores.device)",
            "tests/test_blockwise_attention.py::test_derivatives_are_those_of_the_plain_formulas",
        ),
        "a tangent of attention's gradient in place has no part of the weights' tangent": (
            "_along_in_place(p, dg).add_(product)",
            "_along_in_place(p, dg)",
            "tests/test_blockwise_attention.py::test_a_gradient_and_its_tangent_in_place",
        ),
    },
    "compat/together.py": {
        "a tangent of a product's gradient has no part of the matrix's tangent": (
            "_sum(((tct, _transpose(w)), (ct, _transpose(tw))))",
            "_sum(((tct, _transpose(w)),))",
            "tests/test_together.py::test_gradients_and_their_tangents",
        ),
        "hooks do not see a gradient that only they read": (
            "        if weight_tangent is not None and ctx.hooks is not None and not ctx.hooks:",
            "        if weight_tangent is not None and ctx.hooks is not None:",
            "tests/curvature/test_operators.py::test_gradients_that_nobody_reads_are_in_no_product[a hook-False]",
        ),
    },
    "compat/functorch.py": {
        "a rule in place is taken where something takes a derivative": (
            "wrapped(x) or tangent_of(x) is not None or (x.requires_grad and torch.is_grad_enabled())",
            "wrapped(x) or tangent_of(x) is not None",
            "tests/test_together.py::test_a_gradient_of_a_tangent_that_is_closed_over",
        )
    },
    "curvature/spectra.py": {
        "a search begins again without what joins its vectors": (
            "T[: j + 1, j] = T[j, : j + 1] = _orthogonal(space, w, vectors)",
            "T[j, j] = _orthogonal(space, w, vectors)[-1]",
            f"{CURVATURE}::test_eigenvalues_of_matrices_that_end_early",
        ),
        "a density loses what joins its vectors": (
            'add_(w, before, -float(state["betas"][draw, step - 1]))',
            "add_(w, before, 0.0)",
            f"{CURVATURE}::test_densities_are_those_of_the_dense_matrix",
        ),
        "the space of a sketch is not left out": (
            ('v = project_out(A, space.random_vector("signs", seed, sketch_size + index), basis)'),
            'v = space.random_vector("signs", seed, sketch_size + index)',
            f"{CURVATURE}::test_a_trace_by_hand",
        ),
    },
    "curvature/operators.py": {
        "products draw other random numbers": (
            "            random_state.restore()\n",
            "",
            f"{CURVATURE}::test_each_product_draws_the_same_random_numbers",
        ),
        "a result shares the memory of the vector": (
            "copy=True) for x, z in zip(product,",
            "copy=False) for x, z in zip(product,",
            f"{CURVATURE}::test_operators_add_and_scale",
        ),
    },
    "curvature/row_moments.py": {
        "a rank without rows adds the row of zeros that it visits": (
            "if key not in self.sums.matrices or self.empty:",
            "if key not in self.sums.matrices:",
            f"{INFLUENCE}::test_ranks_with_other_numbers_of_rows",
        ),
        "what several stages add to a gradient is squared apart": (
            "            super().keep(key, numel, rows, uses)\n",
            "            self.add_gradients(key, numel, rows, uses)\n",
            f"{INFLUENCE}::test_a_matrix_that_several_stages_use_several_times",
        ),
    },
    "curvature/labels.py": {
        "each pass draws other labels": (
            "torch.manual_seed(mixed(int_seed(self.seed), ",
            "torch.manual_seed(torch.seed() or mixed(int_seed(self.seed), ",
            f"{INFLUENCE}::test_labels_are_the_same_in_each_pass",
        )
    },
    "optim/owners.py": {
        "TF32 chooses eigenvectors": (
            'in ("tf32", "bf16")',
            "in ()",
            "tests/optim/test_shampoo.py::test_small_eigenvalues_are_not_rounded_to_tf32",
        ),
        "all ranks keep all eigenvectors": (
            "Placement(only_at=coordinates, tiers=layout.placement.tiers)",
            "Placement(replicas=axes, tiers=layout.placement.tiers)",
            f"{INFLUENCE}::test_each_number_is_on_one_rank",
        ),
        "the moments of another owner are taken as one's own": (
            "if routes[n] == (source, peers.rank)]",
            "if routes[n][1] == peers.rank and source == peers.rank]",
            "tests/optim/test_kfac.py::test_steps_are_the_papers",
        ),
        "a part of a block is taken where the block's first part lies": (
            "            first += box.numel\n",
            "",
            "tests/optim/test_shampoo.py::test_programs_train_as_one_process",
        ),
    },
    "curvature/unrolling.py": {
        "a step that is made again draws other random numbers": (
            "self.random.setdefault(index, RandomNumbers(_tensor_leaves(current))).restore()",
            "pass",
            "tests/curvature/test_unrolling.py::test_steps_that_are_made_again_draw_the_same_numbers",
        )
    },
    "forward_mode/jvp.py": {
        "tangents are differentiated by torch's formulas": (
            "with sdpa_kernel(SDPBackend.MATH), WrittenOut(), written_in_python():",
            "with sdpa_kernel(SDPBackend.MATH), written_in_python():",
            "tests/transforms/test_jacobian.py::test_derivatives_of_tangents[layer]",
        ),
        "functions of TorchScript lose tangents in a product with a Hessian": (
            "Watched(), applications, written_in_python():",
            "Watched(), applications:",
            f"{FORWARD}::test_functions_of_torchscript_have_the_derivatives_of_what_was_scripted",
        ),
        "a gradient outside is lost in jvp": (
            "for x in (*values, *directions, *optree.tree_leaves(aux))):",
            "for x in ()):",
            f"{FORWARD}::test_each_order_and_choice_of_derivatives",
        ),
    },
    "stages/replay.py": {
        "a function that runs again has torch's norms": (
            "contexts: list[Any] = [] if self.written is None else [self.written()]",
            "contexts: list[Any] = []",
            "tests/stages/test_stage_again.py::test_a_second_run_has_the_norms_of_the_first",
        ),
        "a second run may return any numbers": (
            "                if not difference <= rounding(part):",
            "                if False:",
            "tests/stages/test_stage_again.py::test_state_that_the_first_run_makes_is_not_found_by_the_second",
        ),
        "other random numbers in backward": (
            "        self._restore()\n        watch",
            "        watch",
            f"{DTYPES}::test_random_numbers_are_those_of_the_plain_function",
        ),
        "other autocast in backward": (
            "enabled, dtype = kind in self.autocast, self.autocast.get(kind)",
            "enabled, dtype = False, None",
            f"{DTYPES}::test_what_runs_again_for_a_second_derivative_meets_the_autocast_of_forward",
        ),
        "autocast of backward in what runs again": (
            "dict.fromkeys([*self.autocast, *present])",
            "dict.fromkeys(self.autocast)",
            f"{DTYPES}::test_autocast_inside_a_stage_and_around_it",
        ),
    },
    "tiers/streaming.py": {
        "a step leaves state on disk as it was": (
            "if coming is not None and is_kept:",
            "if False:",
            "tests/optim/test_state_offload.py::test_steps_are_the_same_wherever_things_are_kept[adamw]",
        )
    },
    "tiers/offload.py": {
        "what was read before it changed is taken": (
            "if started is not None and not x.is_inference() and started[1] == x._version:",
            "if started is not None:",
            f"{TRANSFERS}::test_what_is_announced_is_read_once_and_is_what_it_is_when_it_is_taken",
        )
    },
    "optim/state_offload.py": {
        "a state that has left its tier passes": (
            "if node.layout.trainable and placing.plain(node.values) and not _on_tier(node, tier):",
            "if False:",
            "tests/optim/test_state_offload.py::test_a_state_that_has_left_its_tier_is_refused",
        )
    },
    "stages/recompute.py": {
        "subclasses are lost for a second run": (
            "[x.detach() for x in tensors])  # type",
            "tensors)  # type",
            f"{TRAPS}::test_sparse_tensors_and_subclasses",
        ),
        "a second run of other operations": (
            "if operations != self.operations:",
            "if False:",
            f"{TRAPS}::test_a_second_run_of_other_operations_is_an_error",
        ),
        "a second run in other kernels": (
            "        allow(enabled)",
            "        pass",
            f"{TRAPS}::test_a_second_run_uses_the_kernels_of_the_first",
        ),
        "what is dropped counts": (
            "enumerate(x for reference in saved if (x := reference()) is not None)",
            "enumerate(x if (x := reference()) is not None else _Saved(i) for i, reference in enumerate(saved))",
            f"{TRAPS}::test_a_first_run_may_try_something",
        ),
    },
    "stages/entry_exit.py": {
        "hooks on what nothing uses get None": (
            "            if x._backward_hooks:\n                ctx.zeros",
            "            if False:\n                ctx.zeros",
            f"{TRAPS}::test_a_hook_on_a_result_that_no_loss_uses",
        ),
        "a backward pass in a transform makes buffers of its own kind": (
            "with entered([context, functorch.outside_transforms()])",
            "with entered([context])",
            f"{TRAPS}::test_a_backward_pass_inside_of_a_transform",
        ),
        "a second run only where a graph asks for it": (
            "            frame.second()",
            "            pass",
            f"{TRAPS}::test_gradients_are_those_of_one_process",
        ),
    },
    "stages/reduction.py": {
        "no wait for gradients that leave": (
            ("        self.grad_offload.wait_for_gradients()\n"),
            "",
            "tests/tiers/test_simulated_tiers.py::test_the_host_waits_for_what_it_reads_and_for_nothing_else[grads]",
        ),
        "what a first hop reads is freed": (
            "            pending.source = [pending.out]\n",
            "",
            f"{SENT}::test_memory_stays_until_the_last_hop_has_read_it[three hops-replicas]",
        ),
        "what a later hop reads is freed": (
            "                self.held.append(self.out)\n",
            "",
            f"{SENT}::test_memory_stays_until_the_last_hop_has_read_it[three hops-nothing]",
        ),
        "after an error streams beside use memory that is free": (
            "                pending.used_on(stream)",
            "                pass",
            f"{SENT}::test_what_is_on_its_way_after_an_error_keeps_its_memory[three hops-_flat]",
        ),
        "memory is handed out while it is sent": (
            "if self.under_way is not None and (self.sends or self.hops):",
            "if self.under_way is not None and self.hops:",
            TWO,
        ),
        "a step ends without its gradients": (
            "        for pending in in_flight:\n            pending.wait()",
            "        for pending in in_flight:\n            pending.total and pending.total.add(pending.out)",
            TWO,
        ),
        "no sum over replicas": (
            "            return all_reduce(flat, comm)",
            "            return None",
            f"{GRADIENTS}[hybrid_shard-4]",
        ),
        "no wait for the sum over replicas": (
            "            arrived(handle, op, comm.reductions.group_name, self.reduction.purpose)",
            "            op[:3] == 'all' or arrived(handle, op, comm.reductions.group_name, stage)",
            FOUR,
        ),
        "gradients are not cut further": (
            "            self.under_way = _hop(self.reduction, comm, out, self.into, lambda n, dtype: ",
            "            if scatters:\n                self.out = out.chunk(comm.axis.size)[comm.axis.index].clone()"
            "\n                return self.begin()\n"
            "            self.under_way = _hop(self.reduction, comm, out, self.into, lambda n, dtype: ",
            f"{GRADIENTS}[hfsdp-4]",
        ),
        "marks are not looked at": (
            "if torch.equal(end, marks * end[0]):",
            "if True:",
            f"{RANKS}::test_what_comes_with_the_gradients_of_another_stage_tells",
        ),
        "marks stay in gradients": ("    end.zero_()\n", "", ZEROS),
        "gaps keep old numbers": ("        torch._foreach_zero_(gaps)\n", "", ZEROS),
        "holes keep old numbers": ("            out[offset : offset + length].zero_()", "            pass", ZEROS),
        "the last gradient is the sum": (
            "return out if total is None else total.add_(out)",
            "return out",
            f"{ACCUMULATE}::test_uneven_micro_batches_on_processes",
        ),
        "micro-batches put off are forgotten": (
            "        if total.whole is None:\n",
            "        if True:\n",
            f"{ACCUMULATE}::test_uneven_micro_batches_on_processes",
        ),
    },
    "stages/saved.py": {
        "axes of a saved parameter": (
            "self.noted[0].values.keep(x, self.noted[1])",
            "pass",
            f"{TRAPS}::test_a_saved_weight_is_known_to_vary_along_its_own_axes",
        ),
    },
    "stages/routes.py": {
        "narrow gradients are added where they arrive": (
            "(summed.itemsize >= 4 or shard.axis.size == 2)",
            "True",
            NARROW,
        ),
    },
    "stages/prefetch.py": {
        "versions do not count in keys": (
            "*map(id, shards), *versions)",
            "*map(id, shards))",
            f"{OWN}::test_parameters_that_change_when_they_are_gathered_already",
        ),
        "no buffer stays for backward": (
            "if places > 0 else ())",
            "if False else ())",
            f"{TRAPS}::test_a_stage_that_is_made_anew_agrees_once",
        ),
    },
    "stages/buffers.py": {
        "a mode around a call is in what the next call uses": (
            "dispatch.outside_modes() if self._pooled else",
            "contextlib.nullcontext() if self._pooled else",
            f"{TRAPS}::test_a_mode_leaves_nothing_in_buffers",
        ),
        "a graph depends on what was gathered before": (
            "dispatch.outside_modes() if self._pooled else",
            "contextlib.nullcontext() if self._pooled else",
            f"{TRAPS}::test_an_evaluation_has_a_graph_whatever_was_gathered_before",
        ),
        "a buffer that somebody holds is handed out": (
            "if not b.under_way and b.unheld()]",
            "if not b.under_way]",
            f"{TRAPS}::test_gradients_are_those_of_one_process",
        ),
    },
    "stages/gather.py": {
        "a buffer is handed out while backward reads it": (
            "// dtype.itemsize * dtype.itemsize, dtype).detach()",
            "// dtype.itemsize * dtype.itemsize, dtype)",
            "tests/stages/test_second_runs.py::test_gradients_are_those_without_remat_with_other_options",
        ),
        "tags are not looked at": (
            "if torch.equal(tail, gather.tag):",
            "if True:",
            f"{REFUSALS}::test_what_comes_with_the_parameters_of_another_stage_tells",
        ),
    },
    "stages/gather_stream.py": {
        "a gather on its own stream waits for nothing": (
            "        self.stream.wait_stream(self.module.current_stream(self.device))\n",
            "",
            "tests/stages/test_overlap.py::test_gathers_that_start_early_give_the_cpus_numbers_without_a_race",
        ),
    },
    "compat/modes.py": {
        "policies see gathers": (
            "_policies_unseen() if type(innermost()) in _POLICIES else",
            "_policies_unseen() if False else",
            f"{TRAPS}::test_stages_in_each_other",
        ),
    },
    "stages/schedule.py": {
        "an interrupt leaves memory that nothing uses": (
            "            self.reductions.trim()\n",
            "",
            f"{SENT}::test_a_large_stage_does_not_make_all_memory_large_and_interrupts_leave_none",
        ),
        "frozen stages are not caught up with": (
            "if call.done or (any(call.trains) and not any(",
            "if call.done or (not any(",
            f"{RANKS}::test_a_rank_whose_loss_does_not_use_frozen_stages[2-{{}}]",
        ),
        "no part in the backward of others": (
            "                self._without_gradient(call)\n        tape.front",
            "                pass\n        tape.front",
            f"{RANKS}::test_ranks_whose_losses_use_different_stages",
        ),
        "no part in that of stages in a stage": (
            "            schedule._without_gradient(call)",
            "            pass",
            f"{TRAPS}::test_stages_in_each_other",
        ),
        "hops begin by a rank's own tape": (
            "        if any(call.trains):  # which",
            "        for _ in range(1 + call.index % 2):  # which",
            f"{RANKS}::test_hops_begin_in_one_order_whatever_else_is_on_a_ranks_tape[hybrid_shard]",
        ),
        "each rank decides what backward gathers": (
            "functional.psum(flags, callers(self.mesh, signature)).tolist()",
            "flags.tolist()",
            f"{RANKS}::test_a_function_that_reads_its_parameters_at_times",
        ),
        "what nobody has computed is known": (
            "if computing:",
            "if True:",
            "tests/stages/test_skip.py::test_what_all_ranks_skip_at_first_is_gathered_as_ever_later",
        ),
        "what backward does not ask for is kept": (
            'keeps and (asks is not False or signature.keep == "step")',
            "keeps and records",
            f"{TRAPS}::test_what_backward_does_not_ask_for_is_not_kept",
        ),
        "an attribution that ends in the next call's": (
            "            self.release(other)\n\n    def _begin",
            "            pass\n\n    def _begin",
            f"{TRAPS}::test_what_follows_a_step_is_not_attributed_to_its_stages",
        ),
    },
    "stages/consistency.py": {
        "new stages are not compared": (
            '        agree(described, mesh, "stage", subject=_STAGES, axes=callers(mesh, signature))',
            "        pass",
            f"{REFUSALS}::test_stages_that_are_new_are_compared_before_anything_moves",
        ),
        "threads run stages at once": (
            "if inside and inside[-1] != this_thread and not autograd.autograd_thread():",
            "if False:",
            "tests/mesh/test_scope.py::test_threads_that_ranks_cannot_tell_apart_do_not_run_stages_at_once",
        ),
    },
    "collectives/into_buffers.py": {
        "a hop is left out": (
            "for start, name in steps[1:]:",
            "for start, name in steps[2:]:",
            f"{GRADIENTS}[mics-4]",
        ),
        "narrow sums do not arrive": (
            "return CombinedWorks([work], lambda: out.copy_(narrow))",
            "return CombinedWorks([work])",
            TWO,
        ),
        "narrow gradients round at every step": (
            "wide = out if out.dtype.itemsize >= 4 else",
            "wide = out if True else",
            NARROW,
        ),
    },
    "collectives/messages.py": {
        "a gather that is dropped is forgotten": (
            "self.left.append(self.works)",
            "pass",
            "tests/stages/test_lifetimes.py::test_a_gather_that_nobody_waits_for_takes_nothing_from_the_next",
        ),
        "messages do not count calls": (
            "(_kind_digest(kind) + number * 0x1E3779B1)",
            "_kind_digest(kind)",
            f"{COLLECTIVES}::test_ranks_that_do_different_things_wait_and_get_no_wrong_values",
        ),
        "messages do not say what they are": (
            "(_kind_digest(kind) + number * 0x1E3779B1)",
            "(number * 0x1E3779B1)",
            f"{COLLECTIVES}::test_ranks_that_do_different_things_wait_and_get_no_wrong_values",
        ),
        "sums round at every step": (
            'if op == "sum" and len(parts) > 2 and parts[0].dtype.itemsize < 4:',
            "if False:",
            BITS,
        ),
        "each rank sums in its own order": (
            "    if p.size == 2:\n        return combined(gather(p, x, *kind[:2]).unbind(), op)",
            "    if True:\n        return combined(gather(p, x, *kind[:2]).roll(-p.index, 0).unbind(), op)",
            BITS,
        ),
    },
    "tiers/activations.py": {
        "memory of what comes back is free at once": (
            "        activation.back.record_stream(side)",
            "        pass",
            "tests/stages/test_simulated.py::test_a_steady_step_waits_only_where_a_number_must_be_known"
            "[a gradient in the middle]",
        ),
    },
    "stages/written.py": {
        "bytes are not compared after a call": (
            "            if number is not None:\n",
            "            if False:\n",
            f"{TRAPS}::test_writing_into_a_parameter_is_an_error",
        ),
    },
    "compiled/regions.py": {
        "a compiled step overwrites an argument before all have read it": (
            "last = max([source, *(user for user in _readers(target) if user is not node)], key=order.__getitem__)",
            "last = source",
            f"{COMPILED}::test_arguments_are_overwritten_after_all_have_read_them",
        ),
        "what overwrites an argument is apart from what reads it": (
            "reads[node] += [x for x in _readers(target) if x in inside and x is not node]",
            "pass",
            f"{COMPILED}::test_arguments_are_overwritten_after_all_have_read_them",
        ),
    },
    "compiled/pure.py": {
        "operations with other numbers are decomposed as one": (
            "return (type(x), repr(x)) if isinstance(x, _EXACT) else (node, x)",
            "return type(x)",
            f"{COMPILED}::test_small_steps_are_as_without_a_compiler[alike]",
        ),
        "operations that read other arguments are decomposed as one": (
            "return fx.Node, index[x]",
            "return fx.Node",
            f"{COMPILED}::test_small_steps_are_as_without_a_compiler[alike]",
        ),
        "what overwrites tensors in a list is not traced with what reads them": (
            "    if isinstance(x, (list, tuple)):\n        return [_with_values(y, value) for y in x]",
            "    if isinstance(x, tuple):\n        return [_with_values(y, value) for y in x]",
            f"{COMPILED}::test_small_steps_are_as_without_a_compiler[writing]",
        ),
    },
    "mesh/liveness.py": {
        "a process that was killed is not noticed": (
            '    return state in "ZX" or start_time != began',
            "    return False",
            "tests/mesh/test_liveness.py::test_a_process_of_this_host_is_known_to_have_ended",
        )
    },
    "mesh/deadlock.py": {
        "a killed rank cannot have done its part": (
            "    return lost if late else sorted([*lost, *killed])",
            "    return sorted([*lost, *killed])",
            "tests/mesh/test_waiting.py::test_only_what_cannot_come_is_given_up",
        )
    },
    "mesh/watchdog.py": {
        "a thread that does not wake keeps its process": (
            "                os._exit(1)",
            "                pass",
            "tests/mesh/test_liveness.py::test_a_killed_process_is_noticed_without_its_connection[False]",
        )
    },
    "compiled/surroundings.py": {
        "a tensor that replaces another is taken for it": (
            "            return current is self.value or (current is not None and current is self.value())",
            "            return True",
            f"{COMPILED}::test_what_changes_after_the_program_was_made_is_an_error[tensor]",
        ),
        "numbers of modules are not watched": (
            "            having.setdefault(key, []).append(where)",
            "            pass",
            "tests/transforms/test_compiled.py::test_a_change_is_noticed_wherever_it_is",
        ),
        "other modules in a module are not noticed": (
            "return tuple([None if x is None else weakref.ref(x) for",
            "return tuple([None for",
            "tests/transforms/test_compiled.py::test_a_change_is_noticed_wherever_it_is",
        ),
    },
    "compiled/graphed.py": {
        "what a step does not read must not change either": (
            "            program.around = unchanged_values(program.around, captured_values(self.step))",
            "            pass",
            f"{COMPILED}::test_what_a_step_does_not_read_may_change",
        )
    },
    "compiled/stages.py": {
        "a second run in a compiled step draws numbers of its own": (
            "        if not self.again:",
            "        if True:",
            f"{AS_IT_IS}[2-dropout, remat]",
        ),
    },
    "compiled/tracing.py": {
        "a compiled step leaves out collectives of which this rank has no use": (
            "            inductor.keep(func)",
            "            pass",
            f"{AS_IT_IS}[2-adafactor]",
        ),
        "results that change places are written one after another": (
            'if regions.origin(result).op == "placeholder":',
            "if False:",
            f"{COMPILED}::test_results_may_change_places",
        ),
        "a compiled step loses what is written into a part of a tensor": (
            "            if regions.is_free(user):\n                aliases.append(user)",
            "",
            "tests/transforms/test_compiled.py::test_what_overwrites_a_tensor_from_elsewhere_in_any_way_does_so_when_compiled",
        ),
        "a compiled step loses running statistics": (
            "if func in _UPDATES and args[3] is not None",
            "if func is None",
            "tests/transforms/test_compiled.py::test_what_overwrites_a_tensor_from_elsewhere_in_any_way_does_so_when_compiled",
        ),
    },
    "collectives/ops.py": {
        "pvary's transpose sums nothing": (
            "transpose=lambda ct, group: psum(ct, group),",
            "transpose=lambda ct, group: pvary(ct, group),",
            f"{COLLECTIVES}::test_a_transpose_pulls_back_what_the_collective_pushes",
        )
    },
    "collectives/functional.py": {
        "no copy along one rank": (
            "return kernels.copy(tensor) if tensor is leaf else tensor",
            "return tensor",
            f"{COLLECTIVES}::test_a_write_into_the_result_leaves_the_argument_alone",
        )
    },
    "parallel/pipeline.py": {
        "pipelines of other lengths": (
            "        if other != value:\n",
            "        if False:\n",
            f"{PIPELINES}::test_what_fails_on_one_rank_is_an_error_on_all",
        ),
        "parts may close over tensors": (
            "for leaf in autograd.leaves_of(outputs)):",
            "for leaf in []):",
            f"{PIPELINES}::test_what_fails_on_one_rank_is_an_error_on_all",
        ),
    },
    "parallel/messages.py": {
        "parts may change what they sent": (
            "    if versions(tensors) != before:\n",
            "    if False:\n",
            f"{PIPELINES}::test_a_tensor_that_is_on_its_way_must_not_change",
        ),
        "a pipeline's failed send is raised as it is": (
            "                sends.append((_call_peer(group.send, [row], to, next(left)), row, versions([row])))",
            "                sends.append((group.send([row], to, next(left)), row, versions([row])))",
            "tests/parallel/test_pipeline.py::test_whatever_cannot_be_sent_says_which_rank_is_gone",
        ),
    },
    "optim/guard.py": {
        "steps compare nothing": (
            "            self._refuse(params, grads, state)\n            num_params",
            "            num_params",
            f"{OPTIMIZERS}::test_a_step_refuses_what_does_not_belong_together",
        ),
        "a swapped call passes": (
            "if any(x is param for x in leaves_of):",
            "if False:",
            f"{OPTIMIZERS}::test_a_swapped_call_is_noticed_wherever_the_parameters_are_known",
        ),
    },
    "optim/torch.py": {
        "optimizers of others get tensors without elements": (
            "    if stretch.empty:\n        variable",
            "    if False:\n        variable",
            f"{OPTIMIZERS}::test_an_optimizer_of_another_library_gets_no_rest_without_elements",
        ),
    },
    "optim/shampoo.py": {
        "roots of factors keep their bias": (
            'factor / (1 - n["b2"] ** t)',
            "factor",
            "tests/optim/test_shampoo.py::test_shampoo_is_the_papers",
        ),
        "rounding chooses eigenvectors": (
            "factor - values[-1] * (zero * fixed) @ zero",
            "factor",
            f"{OPTIMIZERS}::test_every_optimizer_with_every_strategy_trains_as_one_process[full_shard-4]",
        ),
    },
    "optim/kfac.py": {
        "K-FAC's factors keep their bias": (
            '1 - hparams["b2"] ** state["estimates"]',
            "1.0",
            "tests/optim/test_kfac.py::test_steps_are_the_papers",
        ),
        "a matrix has another owner where some have no gradient": (
            "on_owner([leaves.each[i] for i in gradients], list(gradients.values())",
            "on_owner([leaves.each[i] for i in present], [gradients[i] for i in present]",
            "tests/optim/test_kfac.py::test_a_stage_without_a_gradient_stays_and_others_go_on",
        ),
    },
    "transforms/checking.py": {
        "pieces of shards are nothing to the checker": (
            "            if is_unit(leaf.value):\n                allowed",
            "            if is_flat(leaf.value):\n                allowed",
            "tests/check/test_kinds.py::test_a_piece_of_a_shard_is_the_same_on_all_replicas",
        ),
        "ranks that end their records at different places differ in what comes after": (
            "absent=not trace.prefix",
            "absent=True",
            "tests/check/test_price.py::test_ranks_that_do_not_do_as_much_wait_for_nobody[317]",
        ),
    },
    "curvature/influence.py": {
        "a folder of gradients is not compared with the batch": (
            "if file_id in files and files[file_id][2] != digest:",
            "if False:",
            "tests/curvature/test_influence.py::test_errors_of_stores_are_told_on_all_ranks",
        )
    },
    "checkpoint/writing.py": {
        "a background save copies nothing": (
            "copies = snapshot_of([box.values for box in flat_tree.boxes])",
            "copies = [box.values for box in flat_tree.boxes]",
            "tests/checkpoint/test_checkpoint.py::test_training_goes_on_while_a_checkpoint_is_written",
        )
    },
    "run/stepping.py": {
        "random numbers are the same at every step": (
            "seed_all(self.seed, n, 0 if self.exact else self.place)",
            "seed_all(self.seed, 0 if self.exact else self.place)",
            f"{RUN}/test_loop.py::test_random_numbers_are_those_of_step_and_place_whatever_happens_between",
        ),
        "batches draw from the numbers of steps": (
            "self._generators.restore()",
            "pass",
            f"{RUN}/test_checking.py::test_a_run_on_a_loader_that_shuffles_goes_on_with_its_rows",
        ),
        "a loader begins otherwise when it goes on": (
            'seed_all(self.seed, "batches", self.place)',
            'seed_all(self.seed, "batches", start, self.place)',
            f"{RUN}/test_checking.py::test_a_run_on_a_loader_that_shuffles_goes_on_with_its_rows",
        ),
    },
    "run/sources.py": {
        "a step's end of iteration is the batches'": (
            "    except StopIteration as error:  # which whoever iterates over batches would take for their end\n"
            "        raise RuntimeError(",
            "    except ZeroDivisionError as error:\n        raise RuntimeError(",
            f"{RUN}/test_states.py::test_what_stops_iteration_inside_does_not_end_a_run_in_silence",
        ),
        "workers get what is for the run": (
            "    os.setpgid(0, 0)\n",
            "",
            f"{RUN}/test_feeding.py::test_a_signal_to_all_of_a_process_group_leaves_workers_alone",
        ),
        "a collate's memory is the batch's": (
            "return batch if collate is None else owned(batch)",
            "return batch",
            f"{RUN}/test_owning.py::test_what_makes_a_batch_of_rows_may_fill_its_memory_again",
        ),
    },
    "run/streams.py": {
        "a stream's end keeps the reader's generators": (
            "            if ended:\n                yield State.END, None",
            "            if ended:\n                torch.manual_seed(0)\n                yield State.END, None",
            f"{RUN}/test_streams.py::test_the_programs_own_random_numbers_are_left_alone_to_the_end",
        )
    },
    "run/order.py": {
        "an order is that of every epoch": (
            'mixed(self.seed, "order", epoch)',
            'mixed(self.seed, "order")',
            f"{RUN}/test_order.py::test_epochs_and_seeds_have_orders_of_their_own",
        )
    },
    "run/batch_consistency.py": {
        "the same rows on all ranks pass": (
            "if i != j and rows[i] >= TELLING:",
            "if False:",
            f"{RUN}/test_checking.py::test_a_forgotten_sampler_is_an_error_at_the_first_step",
        )
    },
    "run/collating.py": {
        "the longest rank does not say what it cannot fill": (
            "same = min_sizes[dims] == max_sizes[dims]",
            "same = list(shape_of(leaf)) == max_sizes[dims]",
            f"{RUN}/test_ragged.py::test_what_cannot_be_filled_is_said_on_every_rank",
        ),
        "filled labels count": (
            '"labels": -100',
            '"labels": 0',
            f"{RUN}/test_ragged.py::test_what_differs_is_filled_at_its_ends",
        ),
    },
    "run/interrupts.py": {
        "a reason to stop goes away again": (
            "return self._why",
            "return 2 if self.signaled is not None else int("
            "self.end is not None and time.monotonic() + needs + MARGIN > self.end)",
            f"{RUN}/test_interrupts.py::test_a_reason_stays",
        )
    },
    "run/looping.py": {
        "a stopped run is not told why": (
            "combined = common(received, _combine_reports(run, reached))",
            "combined = _combine_reports(run, reached)",
            f"{RUN}/test_interrupts.py::test_a_run_that_stops_says_why_also_when_the_reason_has_gone",
        ),
        "an evaluation that was left out stays out": (
            "    if start:  # whoever",
            "    if False:  # whoever",
            f"{RUN}/test_early.py::test_an_evaluation_that_a_stop_has_left_out_comes_when_the_run_goes_on",
        ),
        "a state with nan is saved": (
            "        _refuse_nan(run, state, step)\n        run.saver.save",
            "        run.saver.save",
            f"{RUN}/test_nonfinite.py::test_a_state_with_nan_is_never_saved_though_the_loss_was_finite",
        ),
        "a state of another kind is saved": (
            "if run.kinds is not None:  # None",
            "if False:  # None",
            f"{RUN}/test_states.py::test_a_state_that_becomes_something_else_later_is_not_saved",
        ),
    },
    "run/checkpoints.py": {
        "another run's rows are gone on with": (
            '    origin.check(Origin(head["run.seed"], head["run.batches"]), path)\n',
            "",
            f"{RUN}/test_refusals.py::test_a_run_goes_on_only_as_the_one_it_was",
        )
    },
    "run/folder.py": {
        "a damaged checkpoint is passed over": (
            'if torn and (path is None or resume != "previous"):',
            "if torn and path is None:",
            f"{RUN}/test_folders.py::test_a_damaged_checkpoint_is_an_error_on_every_rank_and_never_a_beginning",
        ),
        "a checkpoint is of any step": (
            'if "step" in manifest.numbers and manifest.numbers["step"] != step_of(path):',
            "if not manifest.numbers:",
            f"{RUN}/test_folders.py::test_a_damaged_checkpoint_is_an_error_on_every_rank_and_never_a_beginning",
        ),
    },
    "checkpoint/folders.py": {
        "a disk that does not answer has nothing": (
            "return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)",
            "return True",
            f"{RUN}/test_folders.py::test_a_disk_that_does_not_answer_has_not_said_that_there_is_nothing",
        )
    },
    "run/agreeing.py": {
        "some turns are not counted": (
            'with waiting.on("agreeing whether the run goes on", self.team.group.group_name, note="in sf.run.loop"):',
            "if True:",
            f"{RUN}/test_agreeing.py::test_every_rank_comes_to_every_turn",
        )
    },
    "run/async_metrics.py": {
        "metrics are waited for on the current device": (
            "event.record(module.current_stream(device))",
            "event.record()",
            f"{RUN}/test_late.py::test_metrics_are_waited_for_on_the_stream_of_their_own_device",
        )
    },
    "transforms/fitting.py": {
        "each rank knows what fits by its own size": (
            "_, rows, elements = rows_of_ranks.amax(0).tolist()",
            "_, rows, elements = row.tolist()",
            f"{RUN}/test_ragged.py::test_what_fits_is_known_of_the_rank_with_the_most",
        ),
        "what runs again draws other numbers": (
            "        random.restore()\n",
            "",
            f"{FITTING}::test_whatever_the_step_does",
        ),
    },
    "transforms/shortage.py": {
        "whatever fails after want of memory is want of memory": (
            "ids = set(before) - {id(error)}",
            "ids = set[int]()",
            f"{FITTING}::test_an_error_is_not_for_want_of_memory_because_it_comes_after_one_that_was",
        )
    },
    "check/reductions.py": {
        "means of micro-batches are not looked at": (
            "        are_means = all(_is_a_mean(case, event.loss, begin) for event in events) and len(events) > 1",
            "        are_means = False",
            f"{WRONG}[micro_batches_of_global_means]",
        ),
        "a sum of what is the same everywhere is let through": (
            "certain = (types.declared[call.node] or call.backward)",
            "certain = call.backward",
            f"{WRONG}[psum_twice_loss]",
        ),
        "means over rows that are cut may be summed": (
            'if call.name == "psum" and not (_sum_of_full_values(case, call) or _sum_of_means(case, call)):',
            'if call.name == "psum" and not _sum_of_full_values(case, call):',
            f"{WRONG}[psum_of_mse_loss]",
        ),
        "what varies already may go through pvary": (
            "if call.name in _ONCE and varying_axes & call.axes and not _starts_local_state(case, call):",
            "if call.name in _ONCE and not varying_axes:",
            f"{WRONG}[pvary_twice]",
        ),
        "gradients of replicas that differ are added up": (
            "    return not comes_back and all(",
            "    return all(",
            "tests/check/test_kinds.py::test_gradients_of_replicas_that_differ_are_not_added_up_in_silence[autograd]",
        ),
        "ranks count other rows, and nobody compares": (
            "uneven = case.compared.counts.get(mean, 0) & call.axes if mean >= 0 and call.own else 0",
            "uneven = 0",
            f"{WRONG}[mean_of_means_ragged]",
        ),
    },
    "check/inputs.py": {
        "noise of which each rank takes another is said to be the same": (
            "        same &= ~case.compared.watched.get(node_id, 0)\n",
            "",
            "tests/check/test_right.py::test_a_right_program_passes_in_silence_and_unchanged"
            "[several_noises_of_which_each_rank_takes_one]",
        ),
        "replicas are taken at their word": (
            "bad = case.compared.nodes.get(argument.node, 0) & ~argument.allowed",
            "bad = 0",
            f"{WRONG}[replicas_initialised_differently]",
        ),
        "every rank may read the same rows": (
            "if sharded and not any(",
            "if not sharded and any(",
            f"{WRONG}[same_batch_everywhere]",
        ),
    },
    "check/varying.py": {
        "the axes that a sum takes away are kept": (
            "            axes &= ~node.axes\n",
            "            pass\n",
            f"{RIGHT}[a_mean_of_means_of_as_many_rows]",
        ),
        "where a parameter met the rows is not said": (
            "                types.first.setdefault((axis, variable), node_id)",
            "                types.first.setdefault((axis, variable), 0)",
            f"{WRONG}[missing_pvary_ddp]",
        ),
    },
    "check/gradients.py": {
        "whoever sums norms of parts is taken to have summed the parts": (
            "[p for p in node.parents if case.is_number(p) or not case.is_number(node_id)]",
            "node.parents",
            f"{WRONG}[parts_that_are_clipped_by_the_norm_of_all_ranks]",
        ),
        "a loss of one rank's rows is taken for that of all": (
            "bad = loss_axes & summed & local(case, mean)",
            "bad = 0",
            f"{WRONG}[psum_forgotten_loss_not_returned_fsdp]",
        ),
        "a loss that every rank has is not looked at": (
            "if not roots or not case.has_equal_bits(loss, bit):",
            "if roots:",
            f"{WRONG}[all_gather_returned_replicated]",
        ),
        "a sum that meets rows is let through": (
            "if types.depends[sum_id] & requested and sum_id >= event.begin:",
            "if types.depends[sum_id] & requested and sum_id >= event.end:",
            f"{WRONG}[mean_of_the_batch_meets_its_rows]",
        ),
        "gradients are whatever they are": (
            "        if new_axes:",
            "        if not new_axes:",
            f"{WRONG}[missing_pvary_ddp]",
        ),
    },
    "check/case.py": {
        "a loss over the number of ranks is taken for a mean": (
            "if ranks in divisors or math.inf in divisors or",
            "if math.inf in divisors or",
            f"{RIGHT}[a_loss_scaled_before_and_after]",
        )
    },
    "check/judging.py": {
        "a result may vary where its spec says that it does not": (
            "    bad &= ~case.reported_axes(node_id, bad)\n",
            "    bad = 0\n",
            f"{WRONG}[psum_forgotten_loss_returned]",
        )
    },
    "check/ops.py": {
        "statistics of a batch are those of one rank's rows": (
            '        node.root = "statistics"\n',
            '        node.root = ""\n',
            f"{WRONG}[batch_norm_local_statistics]",
        )
    },
    "check/values.py": {
        "what is written to keeps its value": (
            "            memory.stamp += 1\n",
            "            pass\n",
            "tests/check/test_property.py::test_what_is_called_the_same_is_the_same",
        ),
        "what was sent keeps the name of what it replaces": (
            "self.keep(x, UNKNOWN, written=True, full=True)",
            "pass",
            f"{RIGHT}[collectives_of_torch_in_the_body]",
        ),
    },
    "interop/deferred_init.py": {
        "what begins draws from one generator, whatever its name": (
            "mixed(int_seed(seed), name)",
            "int_seed(seed)",
            "tests/interop/test_beginning.py::test_parameters_begin_as_their_classes_do_on_any_mesh",
        ),
        "a parameter that nobody sets begins all the same": (
            " or bool(values.isnan().any())",
            "",
            "tests/interop/test_beginning.py::test_what_has_no_beginning_is_an_error_on_every_rank",
        ),
    },
    "interop/module_state.py": {
        "what a failed call set stays": (
            "            attrs.clear()\n            attrs.update(values)\n",
            "            pass\n",
            "tests/interop/test_failures.py::test_what_a_failed_call_set_is_taken_back",
        )
    },
    "interop/in_place.py": {
        "what a module puts into .data of its buffer is lost": (
            "                or memory_of(current) != memory[key]\n",
            "",
            "tests/interop/test_self_mutating.py::test_what_would_be_lost_is_an_error_however_it_is_written",
        )
    },
    "interop/functional.py": {
        "a model's call is traced by torch.compile": (
            '        dynamo.refuse_compiling(f"a call of {type(self.module).__name__}")',
            "        pass",
            "tests/stages/test_torch_compile.py::test_what_works_on_shards_says_what_compiles_it",
        ),
        "the bytes of loose parameters are not compared": (
            "        if self.module.training in self._looked:",
            "        if True:",
            "tests/interop/test_self_mutating.py::test_what_would_be_lost_is_an_error_however_it_is_written",
        ),
    },
}
"""By file in `shardfn` and name: a text that occurs once there, what replaces it, and the test that must fail."""

MUTANTS = [Mutant(name, file, *change) for file, changes in CHANGES.items() for name, change in changes.items()]


def differs(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the file with the change; an AssertionError if `old` does not occur exactly once."""
    text = (root / "shardfn" / mutant.file).read_text()
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.name}: {mutant.file} has {mutant.old!r} {count} times"
    return text.replace(mutant.old, mutant.new)


def caught(mutant: Mutant, deadline: float = 300.0) -> tuple[bool, str]:
    """Whether the mutant's test fails in a copy of the project with the change, and a line of pytest's output.

    Raises:
        RuntimeError: the test neither passed nor failed.
    """
    with tempfile.TemporaryDirectory() as place:
        changed = Path(place) / "shardfn" / mutant.file
        for name in ("shardfn", "tests"):  # with bytecode, which stays valid since copies keep their files' times
            shutil.copytree(ROOT / name, Path(place) / name, ignore=shutil.ignore_patterns(f"{changed.stem}.*.pyc"))
        shutil.copy(ROOT / "pyproject.toml", place)
        changed.write_text(differs(mutant))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider", mutant.test]
        environment = os.environ | {"PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ran = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=deadline)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{mutant.name}: {mutant.test} did not end within {deadline:.0f} s") from None
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()] or [""]
    told = next((line for line in lines if line.startswith("FAILED")), lines[-1]).strip()
    if ran.returncode not in (0, 1):  # for example, if there is no such test
        raise RuntimeError(f"{mutant.name}: pytest ended with {ran.returncode}: {told}")
    return ran.returncode == 1, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants")
    parser.add_argument("--list", action="store_true", help="list names and tests")
    parser.add_argument("--workers", type=int, default=1, help="number of mutants at a time")
    args = parser.parse_args()
    chosen = [one for one in MUTANTS if not args.only or one.name in args.only]
    if unknown := {*args.only} - {one.name for one in chosen}:
        raise SystemExit(f"no mutant is called {', '.join(sorted(unknown))}")
    if args.list:
        print(*(f"{mutant.name} -> {mutant.test}" for mutant in chosen), sep="\n")
        return
    with ThreadPoolExecutor(args.workers) as pool:
        left = sum(not found for found in pool.map(tried, chosen))
    if left:
        raise SystemExit(f"{left} of {len(chosen)} survived, or have no result")


def tried(mutant: Mutant) -> bool:
    """Whether a mutant is caught; prints this, and a line of its test's output."""
    began = time.perf_counter()
    try:
        found, told = caught(mutant)
        result = "caught   " if found else "SURVIVED "
    except (RuntimeError, AssertionError) as error:
        found, result, told = False, "NO RESULT", str(error)
    took = time.perf_counter() - began
    print(f"{result} {mutant.name} ({mutant.file}), {took:.0f} s\n    {told[:200]}", flush=True)
    return found


if __name__ == "__main__":
    main()
