"""What a run's stages need and may hold; all processes know the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rrfp_jax.core.buckets import Bucket, bucket_name
from rrfp_jax.core.step_rules import StepRules
from rrfp_jax.runtime.memory.budget import Setting, StepMemory, memory_of_step
from rrfp_jax.runtime.memory.ledger import StageLedger
from rrfp_jax.runtime.mesh.layout import Layout, taking_turns
from rrfp_jax.runtime.programs.library import Library
from rrfp_jax.runtime.sizes import memory_limit
from rrfp_jax.runtime.stages.optimizer import Optimizer
from rrfp_jax.runtime.stages.stage import Stage


class Memory:
    """The ledgers of all stages, and the budgets of steps by them. Processes ask for either together.

    Args:
        setting: bytes of each device for microbatches in flight.
        layout: where stages are.
        library: the programs of this process's stages.
    """

    def __init__(self, setting: Setting, layout: Layout, library: Library) -> None:
        self._setting, self._layout, self._library = setting, layout, library
        self._stages: Sequence[Stage] = ()
        self._optimizer_bytes: Mapping[int, int] = {}
        self._unadded_gradients = 0
        self._slot_bytes: Callable[[], Mapping[int, int]] = dict
        self._ledgers: Sequence[StageLedger] = ()
        self._known: set[Any] = set()  # what the ledgers have programs for
        self._latest: tuple[Any, StepMemory] = None, StepMemory((), ())

    @property
    def limited(self) -> bool:
        """Whether what is in flight is limited in bytes."""
        if self._setting == "auto":
            stage_meshes = self._layout.stage_meshes.values()
            return any(memory_limit(stage_mesh.device) is not None for stage_mesh in stage_meshes)
        return self._setting is not None

    def start(
        self,
        stages: Sequence[Stage],
        optimizers: Sequence[Optimizer],
        rules: StepRules,
        slot_bytes: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """Take note of this process's stages and optimizers, once they have their parameters and state.

        Args:
            stages, optimizers: of this process.
            rules: of steps.
            slot_bytes: gives what the transport keeps of each stage's device.
        """
        self._slot_bytes = slot_bytes
        self._stages = stages
        self._optimizer_bytes = {of.index: own.nbytes for own in optimizers for of in own.stages}
        self._unadded_gradients = rules.unadded_gradients

    def forget(self) -> None:
        """Let go of the stages: what they have goes elsewhere."""
        self._stages = ()

    def ledgers(self) -> list[StageLedger]:
        """What every stage needs, by the programs that are there for training."""
        buckets = self._library.buckets("train")
        slot_bytes = self._slot_bytes()
        turns = taking_turns(self._layout.devices)
        own = [
            StageLedger.of(
                stage,
                self._optimizer_bytes.get(stage.index, 0),
                turns[stage.index],
                self._layout.world.rank,
                {bucket: self._library.programs(bucket, "train")[stage.index] for bucket in buckets},
                self._unadded_gradients,
                slot_bytes.get(stage.index, 0),
                self._library.compile_seconds[stage.index],
            ).plain()
            for stage in self._stages
            if stage.index in self._layout.told and stage.index < self._layout.stages  # replicas are alike
        ]
        rows = self._layout.world.gather("the ledgers of all stages", own)
        return [StageLedger.of_plain(plain) for plains in rows for plain in plains]

    def of_step(self, rules: StepRules, buckets: Sequence[Bucket]) -> StepMemory:
        """What the stage replicas may hold in a step whose programs are there.

        Args:
            rules: of the step.
            buckets: of each microbatch of all replicas.

        Raises:
            UsageError: see `memory_of_step`.
        """
        self._unadded_gradients = max(self._unadded_gradients, rules.unadded_gradients)
        if rules.forward_only or not self.limited:
            nothing = [None] * len(self._layout.groups)
            return StepMemory(nothing, nothing)
        step = rules, tuple(buckets)
        if step != self._latest[0]:
            # Which programs there are follows from these everywhere.
            kinds = tuple(tuple(rules.backward_kinds(stage)) for stage in range(rules.placement.stages))
            needed = kinds, frozenset(buckets), self._unadded_gradients
            if needed not in self._known:
                self._ledgers = self.ledgers()
                self._known.add(needed)
            names, dp = [bucket_name(bucket) for bucket in buckets], self._layout.replicas
            parts = [memory_of_step(self._setting, self._ledgers, rules, names[d::dp]) for d in range(dp)]
            totals = [total for part in parts for total in part.totals]
            budgets = [budget for part in parts for budget in part.budgets]
            self._latest = step, StepMemory(totals, budgets)
        return self._latest[1]
