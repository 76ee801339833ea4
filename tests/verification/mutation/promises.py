"""Mutants of our own promises: admission, order of additions, keys, weights, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.verification.mutation.table import changes


@changes("core.admission:ByChunk.admits")
def one_byte_too_many(original: Any) -> Any:
    def admits(self: Any, chunk: int, microbatch: int) -> Any:
        if self._limit is None:
            return True
        self._limit += 1
        try:
            return original(self, chunk, microbatch)
        finally:
            self._limit -= 1

    return admits


@changes("core.admission:ByChunk.admits")
def whatever_fits(original: Any) -> Any:
    return lambda self, chunk, microbatch: (
        self._limit is None or self.held + self._costs[chunk][microbatch] <= self._limit
    )


@changes("core.admission:Whole._reserve")
def no_reserve(original: Any) -> Any:
    return lambda self, microbatch: 0


@changes("core.admission:Accumulator.accepts")
def parked_without_a_place(original: Any) -> Any:
    return lambda self, chunk, microbatch: True


@changes("core.admission:Accumulator.add")
def added_as_they_come(original: Any) -> Any:
    return lambda self, chunk, microbatch: (microbatch,)


@changes("core.admission:Accumulator.add")
def added_the_other_way_round(original: Any) -> Any:
    return lambda self, chunk, microbatch: original(self, chunk, microbatch)[::-1]


@changes("runtime.stages.step:ModelStep.accumulate")
def a_parked_gradient_lost(original: Any) -> Any:
    return lambda self, chunk, microbatch: self._parked.pop((chunk, microbatch)) and None


@changes("runtime.stages.stage:Stage.put_sums")
def a_donated_buffer_again(original: Any) -> Any:
    return lambda self, chunk, sums: None


@changes("runtime.stages.optimizer:_update_of")
def sums_not_zeroed(original: Any) -> Any:
    def update_of(*arguments: Any) -> Any:
        update = original(*arguments)

        def kept(old: Any, state: Any, sums: Any, others: Any, scale: Any) -> Any:
            new, changed, _, given = update(old, state, sums, others, scale)
            return new, changed, sums, given

        return kept

    return update_of


@changes("runtime.engine.engine:Engine.reset_gradients")
def what_was_not_applied_stays(original: Any) -> Any:
    return lambda self: None


@changes("runtime.stages.optimizer:Optimizer.update")
def a_stage_without_an_update(original: Any) -> Any:
    def update(self: Any, scale: float) -> None:
        if any(stage.index == 1 for stage in self.stages):
            for stage in self.stages:
                stage.reset_gradients()
        else:
            original(self, scale)

    return update


@changes("runtime.stages.step:ModelStep._bind")
def stale_weights(original: Any) -> Any:
    def bind(self: Any, bucket: int, chunk: int, virtual_stage: Any) -> None:
        import jax.numpy as jnp

        first, now = self.stage.__dict__.setdefault("first", {}), self.stage.leaves[chunk]
        self.stage.leaves[chunk] = first.setdefault(chunk, [jnp.copy(leaf) for leaf in now])
        original(self, bucket, chunk, virtual_stage)
        self.stage.leaves[chunk] = now

    return bind


@changes("runtime.stages.step:ModelStep.run")
def the_last_microbatch_dropped(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        import jax.numpy as jnp

        dropped = task.kind == 1 and self.stage.index == 1 and task.microbatch == len(self.buckets) - 1
        before = [jnp.copy(total) for total in self.stage.sums_of(task.chunk)] if dropped else None
        found = original(self, task, in_turn)
        if before is not None:
            self.stage.put_sums(task.chunk, before)
        return found

    return run


@changes("runtime.stages.step:ModelStep.run")
def backward_of_another_microbatch(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        own, other = task[1:], (task.chunk, task.microbatch + 1)
        alike = other in self._held and len(self._held[own]) == len(self._held[other])
        if task.kind == 1 and alike:
            self._held[own], self._held[other] = self._held[other], self._held[own]
        return original(self, task, in_turn)

    return run


@changes("runtime.stages.step:ModelStep.run")
def other_noise_in_the_backward(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        if task.kind == 1:
            self._held[task[1:]] = [
                array + 1 if array is not None and array.shape == (3,) and array.dtype == "uint32" else array
                for array in self._held[task[1:]]
            ]
        return original(self, task, in_turn)

    return run


def _without(place: int) -> Any:
    """A random key that one of its numbers does not count for: of seed, step, microbatch and layer."""

    def make(original: Any) -> Any:
        def key(self: Any) -> Any:
            numbers, layer = [*self._ids], self._layer
            if place == 3:
                layer = 0
            else:
                numbers[place] = numbers[place] * 0
            return original(type(self)(self._fields, numbers, layer, self.training))

        return key

    return make


for _place, _of in enumerate(["step", "microbatch", "layer"], 1):
    changes("runtime.model.layers:MicrobatchView.key", f"one_key_for_every_{_of}")(_without(_place))


@changes("train.stepping:Stepper.go_on_from")
def data_seen_again(original: Any) -> Any:
    def go_on_from(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        self.steps_done -= 1
        return found

    return go_on_from


@changes("train.resume:CheckpointWriter._put_back")
def layers_named_by_stage(original: Any) -> Any:
    def put_back(self: Any, stages: Any, optimizers: Any, restored: Any) -> None:
        for stage in stages:
            first = min(map(int, stage.params))
            local = {name: str(int(name) - first) for name in stage.params}
            found = {
                key: restored.leaves.get((key[0], local.get(key[1], key[1]), *key[2:]), own)
                for key, own in restored.leaves.items()
            }
            original(self, [stage], [], replace(restored, leaves=found))
        original(self, [], optimizers, restored)

    return put_back


@changes("runtime.stages.optimizer:Optimizer.replace")
def optimizer_state_not_restored(original: Any) -> Any:
    return lambda self, state: None
