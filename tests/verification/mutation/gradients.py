"""Mutants: gradients that are lost, or wrongly summed, averaged, clipped or rounded."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.verification.mutation.mutant import OURS, Mutant
from tests.verification.mutation.mutant import row as any_row

ROWS: list[Mutant] = []
row = partial(any_row, ROWS)

PARITY = "tests/train/test_parity.py::test_gradients_are_those_of_the_whole_batch[2-None]"
PLAIN = "tests/train/test_numbers.py::test_training_is_that_of_plain_jax_and_optax"
ALIASES = "tests/train/test_numbers.py::test_aliases_in_other_chunks_and_in_the_same_one"
REPLICAS = "tests/runtime/test_sharding.py::test_gradients_are_those_of_plain_jax[2-1-2]"
TERM = "tests/runtime/test_layers.py::test_an_auxiliary_term_counts_in_loss_gradient_and_metrics"
LENGTHS = "tests/data/test_documents.py::test_mixed_buckets_equal_the_unpadded_unpipelined_reference"


@row(
    bug="Stages were initialised again between microbatches, which dropped the gradients so far: only the "
    "last "
    "microbatch trained.",
    source="NVIDIA-NeMo/Automodel#3530",
    target="rrfp_jax.runtime.stages.stage:Stage.sums_of",
    here="The programs that compute gradients take the sums and give the new ones; nothing else touches "
    "them.",
    tests=[PARITY],
)
def only_the_last_microbatch(original: Any) -> Any:
    return lambda self, chunk: self.zeros(chunk)


@row(
    bug="Each new sequence length initialised the stages again and wiped the gradients of the lengths "
    "before.",
    source="NVIDIA-NeMo/Automodel#3530",
    target="rrfp_jax.runtime.stages.step:ModelStep.run",
    here="Sums belong to the stage and know no shapes of microbatches; each shape has programs of its own.",
    tests=[LENGTHS],
)
def a_new_length_wipes_gradients(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        bucket = self.buckets[task.microbatch]
        if getattr(self, "latest", bucket) != bucket:
            self.stage.reset_gradients()
        self.latest = bucket
        return original(self, task, in_turn)

    return run


@row(
    bug="The gradients of the microbatches were summed and not averaged, so the norm grew with their number.",
    source="deepspeedai/DeepSpeed#7773",
    target="rrfp_jax.train.stepping:Stepper._update",
    here="An update divides the sums once, by the summed weight of the step's losses.",
    tests=[PLAIN],
)
def summed_and_not_averaged(original: Any) -> Any:
    return lambda self, norm, unit: original(self, norm, unit / max(len(self._latest_plan), 1))


@row(
    bug="The pipeline differentiated the summed loss and divided only the reported one: gradients were too "
    "large by "
    "the number of tokens.",
    source="pytorch/torchtitan#4194",
    target="rrfp_jax.train.stepping:Stepper._update",
    here="Loss and gradient are divided by the same number, which is gathered before the update.",
    tests=[PLAIN],
)
def inflated_by_tokens(original: Any) -> Any:
    return lambda self, norm, unit: original(self, norm, self.standing.loss_scale.value)


@row(
    bug="The schedule divided each loss by the number of microbatches although it had been normalised "
    "already.",
    source="areal-project/AReaL#1273",
    target="rrfp_jax.runtime.stages.stage:Stage.scale_loss",
    here="Losses are sums; the schedule does not know them, and scales nothing.",
    tests=[PARITY],
)
def divided_again(original: Any) -> Any:
    return lambda self, scale: original(self, scale / 4)


@row(
    bug="The gradients so far were rescaled at every accumulation step, so the sum became a moving average.",
    source="pytorch/torchtitan#1733",
    target="rrfp_jax.runtime.stages.stage:Stage.put_sums",
    here="Sums are only added to; they are scaled once, in the program of the update.",
    tests=[PARITY],
)
def a_moving_average(original: Any) -> Any:
    return lambda self, chunk, sums: original(self, chunk, [total / 2 for total in sums])


@row(
    bug="Each microbatch was averaged over its own tokens, so tokens of short microbatches counted more.",
    source="pytorch/torchtitan#2206",
    target="rrfp_jax.runtime.programs.stage_programs:VirtualStageShape.flat",
    here="A loss gives its sum and its weight; a loss that gives means is refused at the start.",
    tests=[PARITY],
)
def a_mean_of_means(original: Any) -> Any:
    def flat(self: Any, params: Any, carry: Any, inputs: Any, training: bool = True) -> Any:
        leaves, total, numbers = original(self, params, carry, inputs, training)
        if total is None:
            return leaves, total, numbers
        return leaves, total / numbers[1], numbers.at[0].divide(numbers[1]).at[1].set(1.0)

    return flat


@row(
    bug="Gradients of data-parallel ranks that had been normalised by their own tokens were averaged.",
    source="NVIDIA/Megatron-LM#4590",
    target="rrfp_jax.runtime.engine.loop:Driver.run",
    here="Replicas add sums; what they are divided by is the weight of all of them.",
    tests=[REPLICAS],
)
def a_mean_of_replicas_means(original: Any) -> Any:
    def run(self: Any, rules: Any, step: int, parts: Any, budgets: Any = ()) -> Any:
        records = original(self, rules, step, parts, budgets)
        weights: dict[int, float] = {}
        for number, part in parts.items():
            own = sum(float(vector[1]) for vector in part.statistics.values())
            replica = number // rules.placement.stages
            weights[replica] = weights.get(replica, 0.0) + own
        for number, part in parts.items():
            if part.phase == "train":
                factor = sum(weights.values()) / len(weights) / weights[number // rules.placement.stages]
                part.stage.replace_sums([total * factor for total in part.stage.sums])
        return records

    return run


@row(
    bug="The gradients of data-parallel ranks were averaged where their sum was right.",
    source="deepspeedai/DeepSpeed#7107",
    target="rrfp_jax.runtime.programs.gradients:_add_replicas",
    here="Replicas add sums, and nothing divides by their number.",
    tests=[REPLICAS],
)
def replicas_averaged(original: Any) -> Any:
    return lambda sums: [total / total.shape[0] for total in original(sums)]


@row(
    bug="Replicas do not add their gradients, and drift apart.",
    source=OURS,
    target="rrfp_jax.runtime.engine.engine:Engine._add_replicas",
    here="A step ends with the sum over its replicas, before the norm is taken.",
    tests=[REPLICAS],
)
def replicas_not_added(original: Any) -> Any:
    return lambda self: None


@row(
    bug="The weight of one replica's losses is ignored, and all its positions are counted.",
    source=OURS,
    target="rrfp_jax.runtime.engine.engine:Engine._results",
    here="Weights come from the program that computes the loss, by microbatch, and are added on every "
    "process.",
    tests=[REPLICAS],
)
def one_replicas_weight_ignored(original: Any) -> Any:
    def results(self: Any, *given: Any) -> Any:
        found, replicas = original(self, *given), self.layout.replicas
        statistics = [
            [v, j, names, [total, 16.0, *rest] if j % replicas else [total, weight, *rest]]
            for v, j, names, (total, weight, *rest) in found["virtual_stages"]
        ]
        return found | {"virtual_stages": statistics}

    return results


@row(
    bug="The gradients of tied embeddings on the first and the last stage were not added right.",
    source="NVIDIA/Megatron-LM#844",
    target="rrfp_jax.runtime.stages.leaves:collect_gradients",
    here="An alias sends its whole sum to the owner's stage, after replicas have added theirs.",
    tests=[ALIASES],
)
def a_tied_gradient_not_added(original: Any) -> Any:
    return lambda ties, stages, exchange: None


@row(
    bug="The gradient of a tied parameter counts twice.",
    source=OURS,
    target="rrfp_jax.runtime.programs.gradients:_add_aliases",
    here="The owner's sum takes each alias once, in the order of declaration.",
    tests=[ALIASES],
)
def a_tied_gradient_twice(original: Any) -> Any:
    return lambda own, theirs: original(own, [*theirs, *theirs])


@row(
    bug="Tied weights on several stages were updated apart, and did not stay equal.",
    source="uw-syfi/piper#25",
    target="rrfp_jax.runtime.stages.leaves:spread_values",
    here="There is one optimizer state and one update; aliases get copies of its result.",
    tests=[ALIASES],
)
def a_tied_value_not_sent_back(original: Any) -> Any:
    return lambda ties, stages, exchange: None


@row(
    bug="Gradients were clipped by the norm of each pipeline stage instead of the whole model's.",
    source="pytorch/torchtitan#596",
    target="rrfp_jax.runtime.stages.stage:Stage.norms",
    here="The norm is gathered over all stages; optimizers that clip by it themselves are refused.",
    tests=[PLAIN],
)
def clipped_by_one_stages_norm(original: Any) -> Any:
    return lambda self: original(self) * (self.index == 0)


@row(
    bug="The norm was taken of bfloat16 gradients, so it and the clipping depended on how layers were split.",
    source="pytorch/torchtitan#4312",
    target="rrfp_jax.runtime.programs.gradients:_norms",
    here="Norms are taken of float32 sums, and added over stages in float64 in the order of stages.",
    tests=[PLAIN],
)
def a_norm_in_bfloat16(original: Any) -> Any:
    def norms(params: Any, sums: Any) -> Any:
        import jax
        import jax.numpy as jnp

        return original(params, jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), sums))

    return norms


@row(
    bug="The norm that clips is that of the sums, before they are divided by the number of tokens.",
    source="pytorch/torchtitan#2972",
    target="rrfp_jax.train.stepping:Stepper._update",
    here="The norm is divided by the step's weight where it is made, and clipping sees no other.",
    tests=[PLAIN],
)
def clipped_before_the_division(original: Any) -> Any:
    return lambda self, norm, unit: original(self, norm * unit, unit)


@row(
    bug="Each microbatch's gradient is clipped before the sum.",
    source=OURS,
    target="rrfp_jax.runtime.programs.gradients:added",
    here="Clipping is a factor of the update, which begins when all microbatches have been added.",
    tests=[PARITY],
)
def clipped_before_the_sum(original: Any) -> Any:
    def added(total: Any, gradient: Any) -> Any:
        import jax.numpy as jnp

        return original(total, gradient / jnp.maximum(1.0, jnp.linalg.norm(gradient)).astype(gradient.dtype))

    return added


@row(
    bug="Gradients stay multiplied by the loss scale.",
    source=OURS,
    target="rrfp_jax.train.stepping:Stepper._update",
    here="Scale and weight are one number, by which norm and sums are divided.",
    tests=[PLAIN],
)
def the_loss_scale_stays(original: Any) -> Any:
    return lambda self, norm, unit: original(self, norm, unit / self.standing.loss_scale.value)


@row(
    bug="A gradient that overflowed is applied because the loss is finite.",
    source=OURS,
    target="rrfp_jax.train.nonfinite:is_finite",
    here="Every stage tells whether its sums are finite, and all stages update or none.",
    tests=[
        "tests/train/test_nonfinite.py::TestHalfPrecision::"
        "test_a_scale_under_which_they_overflow_is_halved_until_they_do_not"
    ],
)
def an_overflow_is_applied(original: Any) -> Any:
    import math

    return lambda sums: all(map(math.isfinite, sums.totals))


@row(
    bug="The auxiliary loss of each microbatch entered without the normalisation, so it weighed more with "
    "every "
    "microbatch.",
    source="NVIDIA-NeMo/Automodel#3359",
    target="rrfp_jax.runtime.model.pipeline:Pipeline.apply_layer",
    here="A layer's own term is a sum with a weight, as the loss is, and is divided with it.",
    tests=[TERM],
)
def an_auxiliary_loss_not_normalised(original: Any) -> Any:
    def apply_layer(self: Any, *arguments: Any) -> Any:
        out, term = original(self, *arguments)
        return out, term and type(term)(term.total * 4, term.weight, term.metrics)

    return apply_layer


@row(
    bug="Losses of layers on other stages than the last one are dropped.",
    source=OURS,
    target="rrfp_jax.runtime.model.pipeline:Pipeline.apply_layer",
    here="Each stage differentiates its own terms, and the results of all stages are added.",
    tests=[TERM],
)
def an_auxiliary_loss_dropped(original: Any) -> Any:
    return lambda self, *arguments: (original(self, *arguments)[0], None)


@row(
    bug="Gradients were accumulated in 16 bits, so many small ones were lost.",
    source="huggingface/trl#2175",
    target="rrfp_jax.runtime.programs.gradients:wide_dtype",
    here="Sums are float32 or wider, whatever the parameters are.",
    tests=["tests/train/test_trainer.py::test_gradients_of_bfloat16_parameters_are_summed_in_float32"],
)
def sums_in_16_bits(original: Any) -> Any:
    return lambda dtype: dtype
