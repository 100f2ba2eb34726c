"""The edge cases that broke public kernel libraries, and the tests that hold each recipe to them.

A case that does not apply to a recipe has its reason here. test_edge_cases.py looks whether the tests are there.
"""

from __future__ import annotations

CASES = {
    1: "non-uniform upstream gradients, also where forward makes the gradients",
    2: "nobody's saved tensor is written to",
    3: "a second backward",
    4: "the upstream gradient is not written to",
    5: "more than 2^31 elements",
    6: "nothing at all, or nothing that counts; targets that are no class",
    7: "sums over chunks in float32",
    8: "autocast",
    9: "torch.compile without a graph break",
    10: "a GPU that is not the current one",
    11: "strided, transposed, expanded, misaligned",
    12: "cuDNN's attention with a mask",
    13: "fully masked rows; causal with other lengths",
    14: "dropout: off in eval, the same in backward and recompute, statistics",
    15: "head sizes and lengths",
    16: "tied weights",
    17: "logits beside the loss; no work for gradients that nobody wants",
    18: "confident rows; all settings together",
    19: "deterministic algorithms; second derivatives refused or right",
    20: "float16 overflow",
    21: "TF32 is the user's",
}

EVERY = "test_edges_every_recipe"
OFFSETS = "test_int64_offsets"
ATTENTION = "test_int64_attention"
DEVICE = "test_other_device"
ON_CPU = f"{OFFSETS}::test_on_the_cpu"
SETTINGS = f"{EVERY}::test_the_users_settings_stay"
UNWANTED = f"{EVERY}::test_nothing_is_done_for_a_gradient_that_nobody_wants"
DETERMINISTIC = f"{EVERY}::test_deterministic_algorithms test_once::test_second_derivative"
LAUNCHES = (
    f"{DEVICE}::test_on_another_gpu {DEVICE}::test_kernels_are_launched_on_the_device_of_their_tensors "
    f"{DEVICE}::test_the_device_is_left_on_error"
)
AGAIN = "test_once::test_a_retained_graph_gives_the_same_again"
AUTOCAST = f"{EVERY}::test_autocast_leaves_dtypes_alone"

# Recipe -> case -> tests.
COVERED: dict[str, dict[int, str]] = {
    "attention": {
        1: "test_attention::test_the_derivative_is_right test_attention_edges::test_expanded_gradients",
        2: "test_attention_edges::test_nothing_given_is_written_to "
        "test_attention_edges::test_a_saved_tensor_that_was_changed_is_noticed "
        "test_attention_triton_edges::test_edge_2_and_4_nothing_given_is_written",
        3: f"test_attention_edges::test_backward_twice {AGAIN}",
        4: "test_attention_edges::test_nothing_given_is_written_to",
        5: f"{ATTENTION}::test_strides {ATTENTION}::test_programs {ATTENTION}::test_bias "
        f"{ATTENTION}::test_kept {ON_CPU}",
        6: "test_attention_edges::test_nothing_at_all test_attention_triton_edges::test_edge_6_nothing_to_attend",
        7: "test_attention::test_a_bias_that_broadcasts_gets_its_gradient test_attention_triton::test_combination",
        8: "test_attention_edges::test_autocast",
        9: "test_attention_compile::test_one_graph test_attention_compile::test_inductor",
        10: f"{LAUNCHES} {DEVICE}::test_the_mask_of_dropout",
        11: "test_attention::test_any_shape_stride_and_dtype test_attention_triton::test_any_shape_and_layout "
        "test_attention_triton_edges::test_edge_11_an_expanded_gradient_and_broadcast_keys",
        12: "test_attention_choice::test_what_a_hopper_gpu_would_take",
        13: "test_attention_edges::test_fully_masked_rows test_attention_edges::test_causal_begins_at_the_top_left "
        "test_attention_triton_edges::test_edge_13_rows_without_a_key "
        "test_attention_triton_edges::test_edge_13_causal_begins_at_the_top_left",
        14: "test_attention_dropout::test_what_is_kept_is_independent test_attention_dropout::test_a_seed_a_call "
        "test_attention_dropout::test_the_same_in_recompute test_attention_dropout::test_off_in_eval_and_at_zero "
        "test_attention_triton_edges::test_edge_14_dropout_keeps_what_it_should",
        15: "test_attention_edges::test_any_head_size_and_length test_attention_triton::test_edge_15_any_head_size "
        "test_attention_triton::test_edge_15_any_length",
        17: f"test_attention_edges::test_no_gradient_work_where_none_is_wanted {UNWANTED}",
        18: "test_attention_edges::test_scores_beyond_exps_range "
        "test_attention_triton_edges::test_edge_18_rows_that_are_sure "
        "test_attention_triton::test_every_pair_of_options_is_among_the_combinations",
        19: f"test_attention_edges::test_a_second_derivative_is_refused test_attention_edges::test_deterministic "
        f"test_attention_triton_edges::test_edge_3_and_19_the_same_at_each_run {DETERMINISTIC}",
        20: "test_attention_edges::test_large_float16_values_do_not_overflow "
        "test_attention_triton_edges::test_edge_20_float16_does_not_overflow",
        21: f"test_attention_triton_edges::test_edge_21_tf32_is_the_users {SETTINGS}",
    },
    "packed_attention": {
        1: "test_packed_attention::test_gradients_of_any_strides test_packed_attention::test_gradcheck",
        2: "test_packed_attention_edges::test_nothing_of_what_was_given_changes",
        3: f"test_packed_attention_edges::test_backward_again {AGAIN}",
        4: "test_packed_attention_edges::test_nothing_of_what_was_given_changes",
        5: f"{ATTENTION}::test_strides {ATTENTION}::test_programs {ON_CPU}",
        6: "test_packed_attention_edges::test_empty",
        7: "test_packed_attention::test_gradcheck_with_a_bias",
        8: "test_packed_attention_edges::test_autocast",
        9: "test_packed_attention_edges::test_compiles_without_a_break "
        "test_packed_attention_edges::test_compiled_by_inductor",
        10: LAUNCHES,
        11: "test_packed_attention::test_any_shape_layout_and_dtype "
        "test_packed_attention::test_gradients_of_any_strides",
        13: "test_packed_attention::test_masks",
        14: "test_packed_attention::test_dropout_is_that_of_its_seed "
        "test_packed_attention::test_dropout_under_checkpoint_and_off",
        15: "test_packed_attention::test_lengths test_packed_attention::test_head_sizes",
        17: UNWANTED,
        19: "test_packed_attention_edges::test_second_derivative_is_refused_and_deterministic_mode_is_fine "
        f"{DETERMINISTIC}",
        20: "test_packed_attention_edges::test_large_float16_does_not_overflow",
        21: SETTINGS,
    },
    "heads": {
        1: "test_heads::test_gradcheck",
        2: "test_heads::test_gradients_are_left_alone",
        3: f"test_heads::test_backward_twice_and_retained_graph {AGAIN}",
        4: "test_heads::test_gradients_are_left_alone",
        5: f"{OFFSETS}::test_gradients_of_heads_that_lie_far_apart {ON_CPU}",
        6: f"{EVERY}::test_heads_of_nothing",
        8: AUTOCAST,
        9: "test_heads::test_compiles_without_a_break",
        11: "test_heads::test_one_gradient_for_all_parts_is_no_whole "
        "test_heads::test_gradients_beside_each_other_in_another_order_are_no_whole",
        15: "test_heads::test_split_qkv_is_split_view_and_transpose",
        17: UNWANTED,
        19: f"test_heads::test_second_derivative_is_refused {DETERMINISTIC}",
        21: SETTINGS,
    },
    "linear_cross_entropy": {
        1: "test_linear_cross_entropy_edges::test_an_upstream_gradient_that_differs_by_row",
        2: "test_linear_cross_entropy_edges::test_no_argument_is_written",
        3: f"test_linear_cross_entropy_edges::test_backward_as_often_as_the_graph_is_retained {AGAIN}",
        4: "test_linear_cross_entropy_edges::test_no_argument_is_written",
        5: f"{OFFSETS}::test_cross_entropy {OFFSETS}::test_scaling {ON_CPU}",
        6: "test_linear_cross_entropy_edges::test_nothing_counts test_linear_cross_entropy_triton::test_nothing_counts "
        "test_linear_cross_entropy::test_what_does_not_fit_is_named",
        7: "test_linear_cross_entropy_edges::test_the_weights_gradient_is_summed_in_float32 "
        "test_linear_cross_entropy_edges::test_products_in_a_narrow_type_are_added_in_float32",
        8: "test_linear_cross_entropy_edges::test_autocast",
        9: "test_linear_cross_entropy_edges::test_compiled_without_a_graph_break "
        "test_linear_cross_entropy_edges::test_the_operator_keeps_its_promises",
        10: LAUNCHES,
        11: "test_linear_cross_entropy_edges::test_misaligned_labels_and_shifted_sequences "
        "test_linear_cross_entropy::test_any_shape_stride_and_dtype",
        16: "test_linear_cross_entropy_edges::test_a_tied_weight",
        17: "test_linear_cross_entropy::test_logits_on_demand "
        "test_linear_cross_entropy::test_the_head_is_a_linear_layer "
        f"test_linear_cross_entropy_edges::test_evaluation_computes_no_gradient {UNWANTED}",
        18: "test_linear_cross_entropy_edges::test_all_settings_together",
        19: f"test_linear_cross_entropy_edges::test_deterministic_mode_and_second_derivatives {DETERMINISTIC}",
        20: "test_linear_cross_entropy_edges::test_a_loss_scale_that_float16_cannot_hold",
        21: SETTINGS,
    },
    "cross_entropy": {
        1: "test_cross_entropy_edges::test_an_upstream_gradient_that_differs_by_row "
        "test_cross_entropy_triton::test_the_upstream_gradient_is_applied",
        2: "test_cross_entropy_edges::test_neither_logits_nor_upstream_are_written",
        3: f"test_cross_entropy_edges::test_backward_as_often_as_the_graph_is_retained {AGAIN}",
        4: "test_cross_entropy_edges::test_neither_logits_nor_upstream_are_written",
        5: f"{OFFSETS}::test_cross_entropy {OFFSETS}::test_strides_of_cross_entropy {OFFSETS}::test_scaling {ON_CPU}",
        6: "test_cross_entropy_edges::test_nothing_counts test_cross_entropy_edges::test_a_target_that_is_no_class "
        "test_cross_entropy_triton::test_nothing_to_launch",
        8: "test_cross_entropy_edges::test_autocast",
        9: "test_cross_entropy_edges::test_compiled_without_a_graph_break "
        "test_cross_entropy_edges::test_compiled_by_inductor "
        "test_cross_entropy_edges::test_the_operator_keeps_its_promises",
        10: LAUNCHES,
        11: "test_cross_entropy_edges::test_labels_that_are_misaligned_and_gradients_that_are_expanded "
        "test_cross_entropy_triton::test_strides",
        17: f"test_cross_entropy_edges::test_evaluation_does_no_gradient_work {UNWANTED}",
        18: "test_cross_entropy_edges::test_a_model_that_is_sure_of_itself "
        "test_cross_entropy_edges::test_all_settings_together "
        "test_cross_entropy_triton::test_confident_and_infinite_rows",
        19: f"test_cross_entropy_edges::test_deterministic_mode_and_second_derivatives {DETERMINISTIC}",
        20: "test_cross_entropy_edges::test_a_loss_scale_that_float16_cannot_hold",
        21: SETTINGS,
    },
    "gelu": {
        1: "test_gelu::test_gradcheck",
        2: "test_gelu::test_nobodys_tensor_is_overwritten "
        "test_gelu_triton::test_a_second_backward_and_inputs_unchanged",
        3: f"test_gelu::test_a_retained_graph_gives_the_same_twice {AGAIN}",
        4: "test_gelu::test_nobodys_tensor_is_overwritten",
        5: f"{OFFSETS}::test_bias_gelu {OFFSETS}::test_strides_of_rows {ON_CPU}",
        6: "test_gelu::test_an_empty_batch test_gelu_triton::test_an_empty_batch",
        7: "test_gelu_triton::test_against_float64 test_gelu_triton::test_groups_of_several_rows",
        8: "test_gelu::test_a_float32_bias_under_autocast",
        9: "test_gelu::test_compiles_in_one_graph test_gelu_triton::test_compiles_in_one_graph",
        10: LAUNCHES,
        11: "test_gelu::test_any_shape_stride_and_dtype test_gelu::test_a_sum_as_loss_gives_an_expanded_gradient "
        "test_gelu_triton::test_strides",
        17: f"test_gelu::test_nothing_is_kept_without_gradients {UNWANTED}",
        19: "test_gelu::test_a_second_derivative_is_refused_by_bias_gelu_and_given_by_gelu "
        f"test_gelu::test_no_memory_is_left_unwritten {DETERMINISTIC}",
        20: "test_gelu_triton::test_large_values_stay_finite",
        21: SETTINGS,
    },
    "swiglu": {
        1: "test_swiglu::test_gradcheck",
        2: "test_swiglu::test_a_retained_graph_gives_the_same_twice_and_inputs_stay",
        3: f"test_swiglu::test_a_retained_graph_gives_the_same_twice_and_inputs_stay {AGAIN}",
        4: "test_swiglu::test_a_retained_graph_gives_the_same_twice_and_inputs_stay",
        5: f"{OFFSETS}::test_gated {OFFSETS}::test_strides_of_rows {ON_CPU}",
        6: "test_swiglu::test_any_shape_stride_and_dtype test_swiglu::test_triton_with_nothing",
        8: AUTOCAST,
        9: "test_swiglu::test_compiles_in_one_graph",
        10: LAUNCHES,
        11: "test_swiglu::test_any_shape_stride_and_dtype test_swiglu::test_triton_with_strides",
        17: UNWANTED,
        19: f"test_swiglu::test_a_second_derivative_is_refused {DETERMINISTIC}",
        20: f"{EVERY}::test_gates_beyond_float16",
        21: SETTINGS,
    },
    "norm": {
        1: "test_norm::test_gradcheck_added test_norm_alone::test_gradcheck_alone",
        2: "test_norm::test_a_retained_graph_and_inputs_stay",
        3: f"test_norm::test_a_retained_graph_and_inputs_stay {AGAIN}",
        4: "test_norm::test_the_gradients_of_input_and_residual_can_be_accumulated_apart",
        5: f"{OFFSETS}::test_norm {OFFSETS}::test_strides_of_rows {ON_CPU}",
        6: "test_norm::test_any_shape_stride_and_dtype",
        7: "test_norm_triton::test_against_float64 test_norm_triton::test_groups_of_several_rows",
        8: "test_norm::test_a_float32_weight_with_bfloat16_and_autocast",
        9: "test_norm::test_compiles_in_one_graph test_norm_triton::test_compiles_in_one_graph",
        10: LAUNCHES,
        11: "test_norm::test_any_shape_stride_and_dtype test_norm_triton::test_without_parameters_and_strided "
        "test_norm_alone::test_a_sum_as_loss_gives_an_expanded_gradient",
        14: "test_norm::test_dropout_and_recompute test_norm_triton::test_dropout_is_that_of_the_cpu",
        17: f"test_norm::test_nothing_is_kept_without_gradients {UNWANTED}",
        19: "test_norm::test_a_second_derivative_is_refused test_norm::test_no_memory_is_left_unwritten "
        f"{DETERMINISTIC}",
        20: f"{EVERY}::test_squares_beyond_float16",
        21: SETTINGS,
    },
    "dropout": {
        1: "test_dropout::test_gradcheck_of_both_derivatives",
        2: "test_dropout::test_a_retained_graph_gives_the_same_twice_and_inputs_stay",
        3: f"test_dropout::test_a_retained_graph_gives_the_same_twice_and_inputs_stay {AGAIN}",
        4: "test_dropout::test_a_retained_graph_gives_the_same_twice_and_inputs_stay",
        5: f"test_dropout::test_the_hash_is_the_documented_one {OFFSETS}::test_dropout {ON_CPU}",
        6: "test_dropout::test_any_shape_stride_and_dtype test_dropout::test_triton_gives_the_same",
        8: AUTOCAST,
        9: "test_dropout::test_compiles_in_one_graph test_dropout::test_triton_backward_and_compile",
        10: LAUNCHES,
        11: "test_dropout::test_any_shape_stride_and_dtype test_dropout::test_triton_gives_the_same",
        14: "test_dropout::test_statistics test_dropout::test_recompute_drops_the_same "
        "test_dropout::test_every_call_drops_others_and_a_seed_repeats_them "
        "test_dropout::test_where_nothing_is_random_it_is_torchs",
        17: f"test_dropout::test_where_nothing_is_random_it_is_torchs {UNWANTED}",
        19: f"test_dropout::test_gradcheck_of_both_derivatives {DETERMINISTIC}",
        21: SETTINGS,
    },
    "rope": {
        1: "test_rope::test_gradcheck",
        2: "test_rope::test_only_tables_are_saved_and_nothing_given_changes",
        3: "test_rope::test_only_tables_are_saved_and_nothing_given_changes",
        4: "test_rope::test_only_tables_are_saved_and_nothing_given_changes",
        5: f"{OFFSETS}::test_rope {OFFSETS}::test_strides_of_rope {ON_CPU}",
        6: "test_rope::test_any_shape_layout_and_dtype",
        8: f"test_rope::test_under_checkpoint_and_autocast {AUTOCAST}",
        9: "test_rope::test_compiles_without_a_break",
        10: LAUNCHES,
        11: "test_rope::test_any_shape_layout_and_dtype test_rope::test_expanded_gradient",
        15: "test_rope::test_any_shape_layout_and_dtype test_rope::test_triton",
        17: UNWANTED,
        19: f"test_rope::test_deterministic_mode_is_fine {EVERY}::test_deterministic_algorithms",
        20: f"{EVERY}::test_rotations_beyond_float16",
        21: SETTINGS,
    },
    "embedding": {
        1: "test_embedding::test_gradcheck_of_both_derivatives",
        2: "test_embedding_engine::test_a_gradient_that_somebody_else_has_is_not_written_to",
        3: f"test_embedding_engine::test_a_retained_graph_and_accumulation_over_steps {AGAIN}",
        4: "test_embedding_engine::test_a_gradient_that_somebody_else_has_is_not_written_to",
        5: ON_CPU,
        6: "test_embedding::test_any_shape_stride_and_dtype test_embedding::test_bad_input_is_named",
        7: "test_embedding::test_explain_says_why test_embedding::test_float32_is_as_exact_as_torch",
        8: AUTOCAST,
        9: "test_embedding::test_compiles_in_one_graph",
        11: "test_embedding::test_any_shape_stride_and_dtype",
        16: "test_embedding::test_backward_gives_torchs_dense_gradient "
        "test_embedding_engine::test_no_gradient_of_the_vocabulary_is_made",
        17: f"test_embedding::test_nothing_is_kept_without_gradients {UNWANTED}",
        19: "test_embedding::test_gradcheck_of_both_derivatives test_embedding::test_no_memory_is_left_unwritten "
        f"{DETERMINISTIC}",
        21: SETTINGS,
    },
}

# Case -> recipes that have nothing to do with it -> why. "" stands for those that are not named and not covered.
NOT_APPLICABLE: dict[int, dict[str, str]] = {
    7: {"": "it adds up nothing over rows: every element of the gradient is written once"},
    10: {"": "it launches no kernel of its own, and torch's operations enter the device themselves"},
    12: {"packed_attention": "it leaves CUDA to attention, whose choice is tested", "": "it computes no attention"},
    13: {"": "it masks no row"},
    14: {"": "nothing of it is random"},
    15: {"": "it knows rows only, of any width"},
    16: {"": "it has no matrix of weights that another layer could share"},
    18: {"packed_attention": "its scores are computed by attention's kernels", "": "it has no softmax"},
    20: {"": "it multiplies nothing that float16 holds by more than 1 / (1 - p), and sums nothing"},
}
