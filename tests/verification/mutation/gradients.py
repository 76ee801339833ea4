"""Mutants: gradients that are lost, or wrongly summed, averaged, clipped or rounded."""

from __future__ import annotations

from typing import Any

from tests.verification.mutation.table import changes


@changes("runtime.stages.stage:Stage.sums_of")
def only_the_last_microbatch(original: Any) -> Any:
    return lambda self, chunk: self.zeros(chunk)


@changes("runtime.stages.step:ModelStep.run")
def a_new_length_wipes_gradients(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        bucket = self.buckets[task.microbatch]
        if getattr(self, "latest", bucket) != bucket:
            self.stage.reset_gradients()
        self.latest = bucket
        return original(self, task, in_turn)

    return run


@changes("train.stepping:Stepper._update")
def summed_and_not_averaged(original: Any) -> Any:
    return lambda self, norm, unit, ran: original(self, norm, unit / max(len(ran.plan.buckets), 1), ran)


@changes("train.stepping:Stepper._update")
def inflated_by_tokens(original: Any) -> Any:
    return lambda self, norm, unit, ran: original(self, norm, self.standing.loss_scale.value, ran)


@changes("runtime.stages.stage:Stage.scale_loss")
def divided_again(original: Any) -> Any:
    return lambda self, scale: original(self, scale / 4)


@changes("runtime.stages.stage:Stage.put_sums")
def a_moving_average(original: Any) -> Any:
    return lambda self, chunk, sums: original(self, chunk, [total / 2 for total in sums])


@changes("runtime.programs.segments:SegmentShape.flat")
def a_mean_of_means(original: Any) -> Any:
    def flat(self: Any, params: Any, carry: Any, inputs: Any, training: bool = True) -> Any:
        leaves, total, numbers = original(self, params, carry, inputs, training)
        if total is None:
            return leaves, total, numbers
        return leaves, total / numbers[1], numbers.at[0].divide(numbers[1]).at[1].set(1.0)

    return flat


@changes("runtime.engine.loop:Driver.run")
def a_mean_of_replicas_means(original: Any) -> Any:
    def run(self: Any, rules: Any, step: int, parts: Any, *more: Any) -> Any:
        records = original(self, rules, step, parts, *more)
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


@changes("runtime.programs.gradients:_add_replicas")
def replicas_averaged(original: Any) -> Any:
    return lambda sums: [total / total.shape[0] for total in original(sums)]


@changes("runtime.engine.engine:Engine._add_replicas")
def replicas_not_added(original: Any) -> Any:
    return lambda self: None


@changes("runtime.engine.engine:Engine._results")
def one_replicas_weight_ignored(original: Any) -> Any:
    def results(self: Any, *given: Any) -> Any:
        found, replicas = original(self, *given), self.layout.replicas
        statistics = [
            [*row, [total, 16.0, *rest] if row[1] % replicas else [total, weight, *rest]]
            for *row, (total, weight, *rest) in found["virtual_stages"]
        ]
        return found | {"virtual_stages": statistics}

    return results


@changes("runtime.stages.leaves:collect_gradients")
def a_tied_gradient_not_added(original: Any) -> Any:
    return lambda ties, stages, exchange: None


@changes("runtime.programs.gradients:_add_aliases")
def a_tied_gradient_twice(original: Any) -> Any:
    return lambda own, theirs: original(own, [*theirs, *theirs])


@changes("runtime.stages.leaves:spread_values")
def a_tied_value_not_sent_back(original: Any) -> Any:
    return lambda ties, stages, exchange: None


@changes("runtime.stages.stage:Stage.norms")
def clipped_by_one_stages_norm(original: Any) -> Any:
    return lambda self: original(self) * (self.index == 0)


@changes("runtime.programs.gradients:_squares")
def a_norm_in_bfloat16(original: Any) -> Any:
    def squares(params: Any, sums: Any, numbers: Any) -> Any:
        import jax
        import jax.numpy as jnp

        rough = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), sums)
        return original(params, rough, numbers)

    return squares


@changes("train.stepping:Stepper._update")
def clipped_before_the_division(original: Any) -> Any:
    return lambda self, norm, unit, ran: original(self, norm * unit, unit, ran)


@changes("runtime.programs.gradients:added")
def clipped_before_the_sum(original: Any) -> Any:
    def added(total: Any, gradient: Any) -> Any:
        import jax.numpy as jnp

        return original(total, gradient / jnp.maximum(1.0, jnp.linalg.norm(gradient)).astype(gradient.dtype))

    return added


@changes("train.stepping:Stepper._update")
def the_loss_scale_stays(original: Any) -> Any:
    return lambda self, norm, unit, ran: original(self, norm, unit / self.standing.loss_scale.value, ran)


@changes("runtime.stages.step:_norms")
def an_overflow_is_applied(original: Any) -> Any:
    return lambda found: original(found)._replace(finite=True)


@changes("runtime.model.pipeline:Pipeline.apply_layer")
def an_auxiliary_loss_not_normalised(original: Any) -> Any:
    def apply_layer(self: Any, *arguments: Any) -> Any:
        out, term = original(self, *arguments)
        return out, term and type(term)(term.total * 4, term.weight, term.metrics)

    return apply_layer


@changes("runtime.model.pipeline:Pipeline.apply_layer")
def an_auxiliary_loss_dropped(original: Any) -> Any:
    return lambda self, *arguments: (original(self, *arguments)[0], None)


@changes("runtime.programs.gradients:wide_dtype")
def sums_in_16_bits(original: Any) -> Any:
    return lambda dtype: dtype
