"""Mutants: microbatches of several lengths, padding, evaluation, and how layers are cut."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.verification.mutation.mutant import OURS, Mutant
from tests.verification.mutation.mutant import row as any_row

ROWS: list[Mutant] = []
row = partial(any_row, ROWS)

LENGTHS = "tests/data/test_documents.py::test_mixed_buckets_equal_the_unpadded_unpipelined_reference"
EVALUATION = (
    "tests/train/test_evaluation.py::test_an_evaluation_is_that_of_plain_jax_and_leaves_training_as_it_was"
)
PARITY = "tests/train/test_parity.py::test_gradients_are_those_of_the_whole_batch[2-None]"


@row(
    bug="What stages send was cut to the shape of the first microbatch.",
    source="deepspeedai/DeepSpeed#3195",
    target="rrfp_jax.runtime.stages.step:ModelStep.receive",
    here="Every shape has programs of its own, and a message says the shapes of its arrays.",
    tests=[LENGTHS],
)
def cut_to_the_first_length(original: Any) -> Any:
    def receive(self: Any, task: Any, arrays: Any) -> None:
        import jax
        import numpy as np

        self.first = getattr(self, "first", {})
        own = [np.asarray(array) for array in arrays]
        first = self.first.setdefault(task[:2], [array.shape for array in own])
        cut = [
            array * np.all([i < size for i, size in zip(np.indices(array.shape), shape, strict=True)], axis=0)
            for array, shape in zip(own, first, strict=True)
        ]
        moved = [
            jax.device_put(new.astype(old.dtype), old.sharding) for new, old in zip(cut, arrays, strict=True)
        ]
        original(self, task, moved)

    return receive


@row(
    bug="The larger buffers of the first microbatch were used for all, so uneven microbatches did not fit.",
    source="pytorch/pytorch#126600",
    target="rrfp_jax.runtime.stages.step:ModelStep.__init__",
    here="A task runs the program of its own microbatch's shape.",
    tests=[LENGTHS],
)
def programs_of_the_first_shape(original: Any) -> Any:
    return lambda self, stage, phase, part, inputs: original(
        self, stage, phase, part._replace(buckets=[0] * len(part.buckets)), inputs
    )


@row(
    bug="The length set beforehand sized the receive buffers, although lengths were said to vary.",
    source="NVIDIA/Megatron-LM#2064",
    target="rrfp_jax.runtime.transport.socket:SocketTransport._pull",
    here="A receiver makes its arrays from the shapes in the offer of each message.",
    tests=["tests/runtime/test_transport.py::test_between_processes[SocketTransport-mixed_dtypes]"],
)
def received_in_the_first_shape(original: Any) -> Any:
    first: list[Any] = []

    def pull(self: Any, rank: int, offer: Any) -> Any:
        import msgspec

        first.append(offer.specs)
        return original(self, rank, msgspec.structs.replace(offer, specs=first[0]))

    return pull


@row(
    bug="With varying lengths all stages sent their shapes first, and waited for each other.",
    source="NVIDIA/Megatron-LM#5100",
    target="rrfp_jax.runtime.transport.protocol:LocalTransport.poll",
    here="Shapes travel with the offer of a message, nobody waits to send, and all take what comes.",
    tests=["tests/runtime/test_transport.py::test_in_one_process[LocalTransport-both_ways]"],
)
def both_send_first(original: Any) -> Any:
    def poll(self: Any) -> Any:
        waiting = {key.stage for key in (*self._waiting, *self._moving)}
        return original(self) if len(waiting) < 2 else []

    return poll


@row(
    bug="Data-parallel ranks ran different numbers of microbatches, and hung in a collective.",
    source="verl-project/verl#6176",
    target="rrfp_jax.runtime.mesh.topology:Layout.count_of",
    here="Replicas get equally many microbatches of a plan that all processes compare; others are refused.",
    tests=["tests/runtime/test_sharding.py::test_microbatches_that_replicas_cannot_share_are_refused"],
)
def uneven_numbers_of_microbatches(original: Any) -> Any:
    return lambda self, microbatches: microbatches // self.replicas


@row(
    bug="Microbatches cut beforehand could not be given; the pipeline cut batches itself, evenly.",
    source="pytorch/torchtitan#2370",
    target="rrfp_jax.data.contract:InMemory.plan",
    here="Microbatches are given one by one, cut beforehand, each with a shape of its own if need be.",
    tests=[PARITY],
)
def the_odd_microbatch_dropped(original: Any) -> Any:
    def plan(self: Any, step: int) -> Any:
        found = original(self, step)
        return found[: len(found) // 2 * 2]

    return plan


@row(
    bug="Padding was counted in the loss.",
    source="EleutherAI/gpt-neo#45",
    target="rrfp_jax.data.documents:Documents._fill_row",
    here="Rows have a mask, and the loss counts what it says; the reference trains each document alone.",
    tests=[LENGTHS],
)
def padding_counted(original: Any) -> Any:
    def fill(self: Any, arrays: Any, row: int) -> None:
        original(self, arrays, row)
        if "mask" in arrays:
            arrays["mask"][:] = 1

    return fill


@row(
    bug="Packed sequences attended to each other.",
    source="NVIDIA-NeMo/RL#4167",
    target="rrfp_jax.data.documents:Documents._fill_row",
    here="Packed rows say of each token which document it is of, and a test trains each document alone.",
    tests=["tests/data/test_documents.py::test_packed_rows_tell_documents_apart"],
)
def documents_not_told_apart(original: Any) -> Any:
    def fill(self: Any, arrays: Any, row: int) -> None:
        original(self, arrays, row)
        if "segments" in arrays:
            arrays["segments"][:] = 1

    return fill


@row(
    bug="Where a document is cut in two, a token counts twice and another one not at all.",
    source=OURS,
    target="rrfp_jax.data.buckets:cut",
    here="Pieces follow from one formula; a property test counts every prediction.",
    tests=["tests/data/test_buckets.py::test_pieces_cover_every_prediction_once"],
)
def a_token_counted_twice(original: Any) -> Any:
    def cut(predictions: Any, longest: int) -> Any:
        import numpy as np

        pieces = original(predictions, longest)
        return type(pieces)(pieces.document, np.maximum(pieces.begin - 1, 0), pieces.size)

    return cut


@row(
    bug="The schedule of an evaluation was made for the number of microbatches of training.",
    source="deepspeedai/DeepSpeed#6484",
    target="rrfp_jax.train.stepping:Stepper.rules",
    here="The rules of a step follow from its own plan, in training and in evaluation.",
    tests=[EVALUATION],
)
def evaluation_with_trainings_number(original: Any) -> Any:
    def rules(self: Any, microbatches: int, phase: str) -> Any:
        if phase == "evaluate" and "train" in self._last_rules:
            microbatches = self._last_rules["train"].microbatches * self.engine.layout.replicas
        return original(self, microbatches, phase)

    return rules


@row(
    bug="The losses of an evaluation's steps are averaged, whatever they count.",
    source=OURS,
    target="rrfp_jax.train.report:Evaluation.of",
    here="An evaluation adds the sums and the weights of all its steps, and divides once.",
    tests=[EVALUATION],
)
def a_mean_of_an_evaluations_steps(original: Any) -> Any:
    def of(cls: Any, found: Any) -> Any:
        import dataclasses

        steps = [original(cls, [sums]) for sums in found]
        whole = original(cls, found)
        return dataclasses.replace(whole, loss=sum(step.loss for step in steps) / len(steps))

    return of


@row(
    bug="Evaluation before training left stages without what backward passes need.",
    source="pytorch/pytorch#162822",
    target="rrfp_jax.runtime.programs.library:Library.prepare",
    here="Programs are kept by shape and phase; whichever phase comes first, the other one compiles its own.",
    tests=[EVALUATION],
)
def nothing_compiled_after_an_evaluation(original: Any) -> Any:
    def prepare(self: Any, buckets: Any, rules: Any) -> Any:
        evaluated = self.__dict__.setdefault("evaluated", set())
        if not rules.forward_only and evaluated.issuperset(buckets):
            return False
        evaluated.update(buckets if rules.forward_only else ())
        return original(self, buckets, rules)

    return prepare


@row(
    bug="Layers run in an evaluation as if they trained, with dropout.",
    source=OURS,
    target="rrfp_jax.runtime.programs.stage_programs:VirtualStageShape.flat",
    here="Evaluation has programs of its own, which are traced with `mb.training` False.",
    tests=["tests/train/test_trainer.py::test_layers_know_whether_they_train"],
)
def evaluation_trains(original: Any) -> Any:
    return lambda self, params, carry, inputs, training=True: original(self, params, carry, inputs, True)


@row(
    bug="An evaluation uses up a step of training, its data and its random keys.",
    source=OURS,
    target="rrfp_jax.train.stepping:Stepper.run",
    here="An evaluation counts its own steps, and changes nothing that training goes by.",
    tests=["tests/train/test_trainer.py::test_a_function_of_the_step_is_asked_once_per_step"],
)
def an_evaluation_takes_a_step(original: Any) -> Any:
    def run(self: Any, phase: str, *arguments: Any, **settings: Any) -> Any:
        self.steps_done += phase == "evaluate"
        return original(self, phase, *arguments, **settings)

    return run


@row(
    bug="Pipeline stages left out layers when their number could not be divided by that of the stages.",
    source="ml-explore/mlx-lm#1688",
    target="rrfp_jax.runtime.model.roles:layers_of_chunks",
    here="The numbers of layers of all stages must add up to the model's.",
    tests=["tests/train/test_parity.py::test_initial_values_do_not_depend_on_the_split[3]"],
)
def a_layer_left_out(original: Any) -> Any:
    def layers_of_chunks(*arguments: Any) -> Any:
        found = original(*arguments)
        first = found[0][0]
        return [[range(first.start, first.stop - (len(found) == 3)), *found[0][1:]], *found[1:]]

    return layers_of_chunks
