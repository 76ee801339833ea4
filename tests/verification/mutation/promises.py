"""Mutants of our own promises: admission, order of additions, keys, weights, checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.verification.mutation.mutant import OURS, Mutant
from tests.verification.mutation.mutant import row as any_row

ROWS: list[Mutant] = []
row = partial(any_row, ROWS)

PARITY = "tests/train/test_parity.py::test_gradients_are_those_of_the_whole_batch[2-None]"
PARITY_4 = "tests/train/test_parity.py::test_gradients_are_those_of_the_whole_batch[4-None]"
PLAIN = "tests/train/test_numbers.py::test_training_is_that_of_plain_jax_and_optax"
DELAYS = "tests/runtime/test_readiness.py::test_other_delays_other_orders_same_gradients"
ADMISSION = "tests/core/test_admission.py::test_the_rule"
ADDING = "tests/core/test_core.py::TestAccumulation::test"
KEYS = "tests/runtime/test_random_keys.py::TestRandomKeys::test"


@row(
    bug="Admission lets one byte more in than the limit.",
    source=OURS,
    target="rrfp_jax.core.admission:ByChunk.admits",
    here="Each answer is compared with the rule written down a second time, for costs drawn at random.",
    tests=[f"{ADMISSION}_spelled_out"],
)
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


@row(
    bug="Admission lets in whatever fits, and lower microbatches find no room to end.",
    source=OURS,
    target="rrfp_jax.core.admission:ByChunk.admits",
    here="An F is admitted only if every lower microbatch can end afterwards (docs/memory.md has the proof).",
    tests=[f"{ADMISSION}_spelled_out"],
)
def whatever_fits(original: Any) -> Any:
    return lambda self, chunk, microbatch: (
        self._limit is None or self.held + self._costs[chunk][microbatch] <= self._limit
    )


@row(
    bug="No room is kept for lower microbatches that have not begun.",
    source=OURS,
    target="rrfp_jax.core.admission:Whole._reserve",
    here="The dearest lower one that has not begun has its room, whatever is admitted before it.",
    tests=[f"{ADMISSION}_of_whole_microbatches_spelled_out"],
)
def no_reserve(original: Any) -> Any:
    return lambda self, microbatch: 0


@row(
    bug="A gradient is computed although there is no place for it.",
    source=OURS,
    target="rrfp_jax.core.admission:Accumulator.accepts",
    here="A backward out of turn runs only if a spare buffer is free; spare buffers are counted.",
    tests=[f"{ADDING}_a_backward_without_a_spare_buffer_waits"],
)
def parked_without_a_place(original: Any) -> Any:
    return lambda self, chunk, microbatch: True


@row(
    bug="Gradients are added in the order in which they come, so two runs differ.",
    source=OURS,
    target="rrfp_jax.core.admission:Accumulator.add",
    here="They are added in the order of microbatches; those ahead of their turn are parked.",
    tests=[f"{ADDING}_parks_ahead_of_turn_and_drains_in_order"],
)
def added_as_they_come(original: Any) -> Any:
    return lambda self, chunk, microbatch: (microbatch,)


@row(
    bug="Parked gradients are added the other way round.",
    source=OURS,
    target="rrfp_jax.core.admission:Accumulator.add",
    here="The turn counts up, and takes each parked one when it comes to it.",
    tests=[f"{ADDING}_parks_ahead_of_turn_and_drains_in_order"],
)
def added_the_other_way_round(original: Any) -> Any:
    return lambda self, chunk, microbatch: original(self, chunk, microbatch)[::-1]


@row(
    bug="A parked gradient is never added.",
    source=OURS,
    target="rrfp_jax.runtime.stages.step:ModelStep.accumulate",
    here="The core says with each dispatch which gradients are added; two runs with other delays give "
    "equal bits.",
    tests=[DELAYS],
)
def a_parked_gradient_lost(original: Any) -> Any:
    return lambda self, chunk, microbatch: self._parked.pop((chunk, microbatch)) and None


@row(
    bug="A buffer that was donated to a program is used again.",
    source=OURS,
    target="rrfp_jax.runtime.stages.stage:Stage.put_sums",
    here="Whoever donates sums puts back what the program gives; XLA refuses donated arrays.",
    tests=[PARITY],
)
def a_donated_buffer_again(original: Any) -> Any:
    return lambda self, chunk, sums: None


@row(
    bug="The sums are not zeroed after an update.",
    source=OURS,
    target="rrfp_jax.runtime.stages.optimizer:_update_of",
    here="The program of the update gives zeros in the place of the sums.",
    tests=[PLAIN],
)
def sums_not_zeroed(original: Any) -> Any:
    def update_of(*arguments: Any) -> Any:
        update = original(*arguments)
        return lambda old, state, sums, scale: (*update(old, state, sums, scale)[:2], sums)

    return update_of


@row(
    bug="The gradients of a step that was not applied stay in the sums.",
    source=OURS,
    target="rrfp_jax.runtime.engine.engine:Engine.reset_gradients",
    here="A step begins with zeroed sums, unless an update has just zeroed them.",
    tests=[PARITY],
)
def what_was_not_applied_stays(original: Any) -> Any:
    return lambda self: None


@row(
    bug="One stage leaves out the update that all others make.",
    source=OURS,
    target="rrfp_jax.runtime.stages.optimizer:Optimizer.update",
    here="All stages update at the same point, or none; Ctrl-C waits for that.",
    tests=[PLAIN],
)
def a_stage_without_an_update(original: Any) -> Any:
    def update(self: Any, scale: float) -> None:
        if any(stage.index == 1 for stage in self.stages):
            for stage in self.stages:
                stage.reset_gradients()
        else:
            original(self, scale)

    return update


@row(
    bug="Programs go on with the weights of before the update.",
    source=OURS,
    target="rrfp_jax.runtime.stages.step:ModelStep._bind",
    here="Each step binds its programs to the parameters of that moment, and forgets them at its end.",
    tests=[PLAIN],
)
def stale_weights(original: Any) -> Any:
    def bind(self: Any, bucket: int, chunk: int, virtual_stage: Any, leaves: Any) -> None:
        import jax.numpy as jnp

        first = self.stage.__dict__.setdefault("first", {})
        kept = first.setdefault(chunk, [jnp.copy(leaf) for leaf in leaves])
        original(self, bucket, chunk, virtual_stage, kept)

    return bind


@row(
    bug="The last stage drops its last microbatch.",
    source=OURS,
    target="rrfp_jax.runtime.stages.step:ModelStep.run",
    here="A step ends when every stage has dispatched every task once; the scheduler counts them.",
    tests=[PARITY],
)
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


@row(
    bug="A backward runs on what another microbatch's forward has left.",
    source=OURS,
    target="rrfp_jax.runtime.stages.step:ModelStep.run",
    here="What a forward leaves is kept by chunk and microbatch, and its backward takes that.",
    tests=[PARITY_4],
)
def backward_of_another_microbatch(original: Any) -> Any:
    def run(self: Any, task: Any, in_turn: bool) -> Any:
        own, other = task[1:], (task.chunk, task.microbatch + 1)
        alike = other in self._held and len(self._held[own]) == len(self._held[other])
        if task.kind == 1 and alike:
            self._held[own], self._held[other] = self._held[other], self._held[own]
        return original(self, task, in_turn)

    return run


@row(
    bug="A backward that computes a layer again drew other random numbers than its forward.",
    source="allenai/OLMo-core#828",
    target="rrfp_jax.runtime.stages.step:ModelStep.run",
    here="A key follows from seed, step, microbatch and layer, so it is the same however often it is drawn.",
    tests=[f"{KEYS}_forward_and_backward_draw_the_same"],
)
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
    ROWS.append(
        Mutant(
            id=f"one_key_for_every_{_of}",
            bug=f"Layers draw the same random numbers in every {_of}.",
            source=OURS,
            target="rrfp_jax.runtime.model.layers:MicrobatchView.key",
            make=_without(_place),
            here="A key follows from seed, step, microbatch and layer; a test counts that all differ.",
            tests=[f"{KEYS}_microbatches_layers_and_steps_draw_differently"],
        )
    )


@row(
    bug="A resumed run saw data again that it had seen before its checkpoint.",
    source="EleutherAI/gpt-neox#308",
    target="rrfp_jax.train.stepping:Stepper.go_on_from",
    here="The data of a step is a function of its number, which is saved; a resumed run is equal to the bit.",
    tests=["tests/checkpoint/test_resume.py::test_it_goes_on_to_the_bit"],
)
def data_seen_again(original: Any) -> Any:
    def go_on_from(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        self.steps_done -= 1
        return found

    return go_on_from


@row(
    bug="A checkpoint named layers by their place on a stage; resumed with other stages, layers had wrong "
    "weights.",
    source="NVIDIA/Megatron-LM#7452",
    target="rrfp_jax.train.snapshot:put_back",
    here="Layers are named by their place in the model, on any number of stages.",
    tests=["tests/checkpoint/test_resume.py::test_on_another_mesh_by_another_schedule"],
)
def layers_named_by_stage(original: Any) -> Any:
    def put_back(stages: Any, optimizers: Any, leaves: Any) -> None:
        for stage in stages:
            first = min(map(int, stage.params))
            local = {name: str(int(name) - first) for name in stage.params}
            found = {
                key: leaves.get((key[0], local.get(key[1], key[1]), *key[2:]), own)
                for key, own in leaves.items()
            }
            original([stage], [], found)
        original([], optimizers, leaves)

    return put_back


@row(
    bug="A resumed run went on with another optimizer state than it had saved, without an error.",
    source="NVIDIA/Megatron-LM#6920",
    target="rrfp_jax.runtime.stages.optimizer:Optimizer.replace",
    here="All leaves of the state are saved and restored by name; a resumed run is equal to the bit.",
    tests=["tests/checkpoint/test_resume.py::test_it_goes_on_to_the_bit"],
)
def optimizer_state_not_restored(original: Any) -> Any:
    return lambda self, state: None
