"""The equality matrix of docs/numbers.md: each row is shown by tests that there are.

By what differs between two runs: the result, where it was shown ("f32", "bf16", "mesh" for `tp` or `dp`), and
by which tests. Where nothing is named, the result follows from the same reason.
"""

import pytest

from tests.docs.test_claims import rows_of, those_in

EXACT, EQUAL, NUMBERS = (
    f"tests/train/test_{name}.py::test_" for name in ("exactness", "equal_schedules", "numbers")
)
PROCESSES = "tests/train/test_processes.py::TestParity::test_"
RUNTIME = "tests/runtime/test_"
PARITY = "tests/train/test_parity.py::test_gradients_are_those_of_the_whole_batch"
RESUME = "tests/checkpoint/test_resume.py::test_"

MATRIX = {
    "timing only": (
        "identical",
        "f32 mesh",
        f"{EXACT}equal_to_the_bit_within_a_placement",
        f"{RUNTIME}sharding.py::test_results_are_equal_to_the_bit_from_run_to_run",
    ),
    "the schedule, if both have fused or both have split backwards": (
        "identical; if one is `gpipe`, `f-priority`, `v-half`, `dualpipe-v`, or `v-min` on 3, 6, ... stages: "
        "rounding",
        "f32 bf16 mesh",
        f"{EXACT}equal_to_the_bit_within_a_placement",
        f"{EQUAL}schedules_of_one_kind_of_backward_are_equal_to_the_bit",
        f"{PROCESSES}schedules_agree_to_the_bit",
    ),
    "the schedule, if only one splits backwards": (
        "rounding",
        "",
        f"{RUNTIME}split.py::test_transformer",
    ),
    "the same, with `equal_schedules=True`": (
        "identical",
        "f32 bf16 mesh",
        f"{EQUAL}gradients_are_equal_to_the_bit_under_all_schedules_and_those_of_plain_jax",
        f"{EQUAL}all_schedules_are_equal_to_the_bit_if_they_are_made_so",
    ),
    "when gradients are added": (
        "identical",
        "f32 bf16",
        f"{RUNTIME}adding.py::test_bits_are_those_of_an_addition_afterwards",
        f"{EXACT}equal_to_the_bit_within_a_placement",
    ),
    "`protocol`, `agreement`, `dispatch`": (
        "identical",
        "f32 mesh",
        f"{RUNTIME}foresight.py::test_bits_and_records",
        f"{RUNTIME}agreement.py::"
        "test_results_are_equal_to_the_bit_from_run_to_run_whatever_the_protocol_and_the_carrier",
    ),
    "the placement: `pp`, `chunks`, `shape`, `split`": (
        "identical; with `tp`, losses of layers, and norms: rounding",
        "f32 bf16",
        f"{EQUAL}no_bit_depends_on_the_stage_that_has_a_layer",
        f"{EXACT}losses_between_placements_are_close",
        PARITY,
        f"{NUMBERS}training_is_that_of_plain_jax_and_optax",
    ),
    "`layers_per_program`, and the placement with it": (
        "rounding",
        "f32",
        f"{RUNTIME}segments.py::test_programs_of_several_layers_compute_the_same",
    ),
    "`tp`, `dp`": ("rounding", "mesh", f"{RUNTIME}sharding.py::test_training_is_that_of_one_device"),
    "the number of processes": (
        "rounding",
        "f32 mesh",
        f"{PROCESSES}training_is_that_of_one_process",
        f"{RUNTIME}agreement.py::test_training_is_that_of_one_process",
    ),
    "stopped and resumed, same mesh": ("identical", "f32", f"{RESUME}it_goes_on_to_the_bit"),
    "resumed on another mesh": (
        "identical; with another `tp` or `dp`: rounding",
        "f32 mesh",
        f"{RESUME}on_another_mesh_by_another_schedule",
        f"{RUNTIME}sharded_state.py::"
        "test_checkpoints_resume_with_other_numbers_of_stages_devices_and_replicas",
    ),
    '`accumulation="arrival"` in either': (
        "rounding",
        "f32",
        f"{NUMBERS}gradients_added_as_they_come_train_as_well",
    ),
    "pipeline against plain JAX": (
        "rounding: 1e-5 (bfloat16: 3e-2) of a leaf's largest value, or 8 times the spread of plain JAX",
        "f32 bf16 mesh",
        f"{EXACT}gradients_between_placements_are_those_of_plain_jax",
        f"{NUMBERS}sums_of_bfloat16_gradients_agree_and_are_float32",
        f"{RUNTIME}sharding.py::test_gradients_are_those_of_plain_jax",
    ),
    "dropout, under another schedule or limit": (
        "identical",
        "f32",
        f"{RUNTIME}random_keys.py::TestRandomKeys::test_schedule_and_limit_change_nothing",
    ),
}


def test_the_page_has_these_rows_with_these_results():
    _, *rows = rows_of("numbers.md", "### The equality matrix")
    assert [(difference, result) for difference, result, _ in rows] == [
        (difference, result) for difference, (result, *_) in MATRIX.items()
    ]


@pytest.mark.parametrize("difference", MATRIX)
def test_every_row_of_the_equality_matrix_is_shown_by_tests_that_there_are(difference):
    result, shown, *tests = MATRIX[difference]
    assert result.partition(":")[0].partition(";")[0] in ("identical", "rounding")
    assert set(shown.split()) <= {"f32", "bf16", "mesh"}
    assert tests
    for name in tests:
        file, _, test = name.partition("::")
        assert those_in(file).get(test) is False, name
