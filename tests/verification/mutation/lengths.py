"""Mutants: microbatches of several lengths, padding, evaluation, and how layers are cut."""

from __future__ import annotations

from typing import Any

from tests.verification.mutation.table import changes


@changes("runtime.stages.step:ModelStep.receive")
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


@changes("runtime.stages.step:ModelStep.__init__")
def programs_of_the_first_shape(original: Any) -> Any:
    return lambda self, stage, phase, part, *more: original(
        self, stage, phase, part._replace(buckets=[0] * len(part.buckets)), *more
    )


@changes("runtime.transport.socket:SocketTransport._pull")
def received_in_the_first_shape(original: Any) -> Any:
    first: list[Any] = []

    def pull(self: Any, rank: int, offer: Any) -> Any:
        import msgspec

        first.append(offer.specs)
        return original(self, rank, msgspec.structs.replace(offer, specs=first[0]))

    return pull


@changes("runtime.transport.protocol:LocalTransport.poll")
def both_send_first(original: Any) -> Any:
    def poll(self: Any) -> Any:
        waiting = {key.stage for key in (*self._waiting, *self._moving)}
        return original(self) if len(waiting) < 2 else []

    return poll


@changes("runtime.mesh.topology:Layout.count_of")
def uneven_numbers_of_microbatches(original: Any) -> Any:
    return lambda self, microbatches: microbatches // self.replicas


@changes("data.contract:InMemory.plan")
def the_odd_microbatch_dropped(original: Any) -> Any:
    def plan(self: Any, step: int) -> Any:
        found = original(self, step)
        return found[: len(found) // 2 * 2]

    return plan


@changes("data.documents:fill_row")
def padding_counted(original: Any) -> Any:
    def fill(row: Any, documents: Any) -> None:
        original(row, documents)
        if "mask" in row:
            row["mask"][:] = 1

    return fill


@changes("data.documents:fill_row")
def documents_not_told_apart(original: Any) -> Any:
    def fill(row: Any, documents: Any) -> None:
        original(row, documents)
        if "segments" in row:
            row["segments"][:] = 1

    return fill


@changes("data.buckets:cut")
def a_token_counted_twice(original: Any) -> Any:
    def cut(predictions: Any, longest: int) -> Any:
        import numpy as np

        pieces = original(predictions, longest)
        return type(pieces)(pieces.document, np.maximum(pieces.begin - 1, 0), pieces.size)

    return cut


@changes("train.stepping:Stepper.rules")
def evaluation_with_trainings_number(original: Any) -> Any:
    def rules(self: Any, microbatches: int, phase: str) -> Any:
        if phase == "evaluate" and "train" in self._rules:
            microbatches = self._rules["train"].microbatches * self.engine.layout.replicas
        return original(self, microbatches, phase)

    return rules


@changes("train.report:Evaluation.of")
def a_mean_of_an_evaluations_steps(original: Any) -> Any:
    def of(cls: Any, found: Any) -> Any:
        import dataclasses

        steps = [original(cls, [sums]) for sums in found]
        whole = original(cls, found)
        return dataclasses.replace(whole, loss=sum(step.loss for step in steps) / len(steps))

    return of


@changes("runtime.programs.library:Library.prepare")
def nothing_compiled_after_an_evaluation(original: Any) -> Any:
    def prepare(self: Any, buckets: Any, rules: Any) -> Any:
        evaluated = self.__dict__.setdefault("evaluated", set())
        if not rules.forward_only and evaluated.issuperset(buckets):
            return False
        evaluated.update(buckets if rules.forward_only else ())
        return original(self, buckets, rules)

    return prepare


@changes("runtime.programs.segments:SegmentShape.flat")
def evaluation_trains(original: Any) -> Any:
    return lambda self, params, carry, inputs, training=True: original(self, params, carry, inputs, True)


@changes("train.stepping:Stepper.run")
def an_evaluation_takes_a_step(original: Any) -> Any:
    def run(self: Any, phase: str, *arguments: Any, **settings: Any) -> Any:
        self.steps_done += phase == "evaluate"
        return original(self, phase, *arguments, **settings)

    return run


@changes("runtime.model.roles:layers_of_chunks")
def a_layer_left_out(original: Any) -> Any:
    def layers_of_chunks(*arguments: Any) -> Any:
        found = original(*arguments)
        first = found[0][0]
        return [[range(first.start, first.stop - (len(found) == 3)), *found[0][1:]], *found[1:]]

    return layers_of_chunks
