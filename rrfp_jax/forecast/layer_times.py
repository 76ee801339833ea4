"""How long the tasks of a step take on given accelerators and links, for any split of the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from rrfp_jax.core.step_rules import Bucket, StepRules
from rrfp_jax.core.tasks import BACKWARD, FORWARD, KINDS, Kind, Task
from rrfp_jax.forecast.accelerators import Accelerator, Link
from rrfp_jax.forecast.model_costs import ModelCosts
from rrfp_jax.trace.costs import TableCosts


@dataclass(frozen=True)
class LayerTimes:
    """A model's layers on accelerators of one kind."""

    model: ModelCosts
    accelerator: Accelerator

    @cached_property
    def tasks(self) -> dict[Bucket, list[dict[Kind, float]]]:
        """Seconds by bucket, layer and kind; what releases a microbatch has the adding of its gradient."""
        adding = [self.accelerator.seconds({}, state.adding_bytes) for state in self.model.states]
        return {
            bucket: [
                {
                    kind: self.accelerator.seconds(cost.flops, cost.bytes) + more * (KINDS[kind].charge < 0)
                    for kind, cost in layer.programs.items()
                }
                for layer, more in zip(layers, adding, strict=True)
            ]
            for bucket, layers in self.model.layers.items()
        }

    @cached_property
    def updates(self) -> list[float]:
        """Seconds by layer of what is done once a step: norms and the optimizer."""
        return [self.accelerator.seconds({}, state.update_bytes) for state in self.model.states]

    @cached_property
    def kinds(self) -> list[Kind]:
        """Of the tasks that make up a microbatch: F and B, or F, I and W."""
        known = list(next(iter(self.model.layers.values()))[0].programs)
        return [FORWARD, BACKWARD] if BACKWARD in known else known

    def of_step(self, layer: int, buckets: Sequence[Bucket]) -> float:
        """Seconds of one layer in a step of microbatches of these buckets."""
        microbatches = sum(self.tasks[bucket][layer][kind] for bucket in buckets for kind in self.kinds)
        return microbatches + self.updates[layer]

    def flops(self, bucket: Bucket, chunks: Sequence[range]) -> float:
        """Of a microbatch, forward and backward, on a stage with these virtual stages of the model."""
        programs = [self.model.layers[bucket][i].programs for layers in chunks for i in layers]
        return sum(sum(own[kind].flops.values()) for own in programs for kind in self.kinds)

    def costs(
        self, rules: StepRules, buckets: Sequence[Bucket], chunks: Sequence[Sequence[range]], link: Link
    ) -> TableCosts:
        """What the simulator is to know of a step.

        Args:
            rules: of the step.
            buckets: of each microbatch.
            chunks: by stage, the layers of each of its chunks.
            link: between stages.
        """
        durations, transfers = {}, {}
        for stage, virtual_stages in enumerate(chunks):
            for c, (layers, kinds) in enumerate(
                zip(virtual_stages, rules.backward_kinds(stage), strict=True)
            ):
                known = {
                    bucket: list(self._virtual_stage(bucket, layers, [FORWARD, *kinds], link))
                    for bucket in self.model.layers
                }
                for j, bucket in enumerate(buckets):
                    for kind, lasts, sent_for in known[bucket]:
                        durations[stage, Task(kind, c, j)] = lasts
                        transfers[stage, Task(kind, c, j)] = sent_for
        return TableCosts(durations, transfers)

    def _virtual_stage(
        self, bucket: Bucket, layers: range, kinds: Sequence[Kind], link: Link
    ) -> Iterator[tuple[Kind, float, float]]:
        """The tasks of a virtual stage, with their duration and that of their output's transfer."""
        activation = self.model.layers[bucket][layers.stop - 1].carry_bytes
        gradient = self.model.layers[bucket][layers.start].footprint.gradient_out_bytes
        for kind in kinds:
            duration = sum(self.tasks[bucket][i][kind] for i in layers)
            yield kind, duration, link.seconds(activation if KINDS[kind].flow > 0 else gradient)
