"""`schedule="auto"` between steps: measured costs may choose another hint on the same placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from time import perf_counter

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.step_rules import Bucket, StepRules, bucket_name
from rrfp_jax.errors import UsageError
from rrfp_jax.printing import say
from rrfp_jax.runtime.engine.engine import Engine
from rrfp_jax.sim.choice import Auto, Candidate, choose
from rrfp_jax.trace.costs import WorkloadCosts, measured
from rrfp_jax.trace.records import RecordedStep


class HintExchange:
    """When measured costs are looked at, and what they say.

    They are after 1, 2, 4, 8, ... steps, so choosing takes ever less of a run. Only hints that split the same
    backwards are compared: they run the programs that have been measured, and no other has to be compiled.
    """

    def __init__(self, auto: Auto) -> None:
        self._auto = auto
        self._steps = 0

    @classmethod
    def between_steps(cls, auto: Auto, replicas: int) -> HintExchange:
        """For a Trainer that is told so when it has been made.

        Raises:
            UsageError: it measures nothing, or cannot with so many replicas.
        """
        if not auto.exchange:
            raise UsageError(
                "schedule=Auto(exchange=False) is chosen when a Trainer is made; between steps give 'auto'"
            )
        if replicas > 1:
            raise UsageError(
                f"schedule='auto' between steps with dp={replicas}: only steps of one replica are measured; "
                f"give a hint such as bfw"
            )
        return cls(auto)

    def due(self) -> bool:
        """Whether it is time; asked before every step that trains but the first."""
        self._steps += 1
        return self._steps & (self._steps - 1) == 0

    def chosen(
        self,
        step: int,
        rules: StepRules,
        buckets: Sequence[Bucket],
        earlier: Iterable[RecordedStep],
        engine: Engine,
    ) -> Schedule:
        """The schedule from a step on, as rank 0 finds it; all processes ask together.

        Args:
            step: the next one.
            rules: of a step with the present schedule.
            buckets: of its microbatches.
            earlier: steps that have run.
            engine: that ran them.
        """
        world, present, told = engine.world, rules.name, None
        engine.prepare(buckets, rules)  # the budgets follow from the programs
        began = perf_counter()
        candidates = self._candidates(rules, buckets, earlier, engine)
        if world.rank == 0:
            choice = choose(candidates, present)
            told = choice.name
            if told != present:
                seconds = perf_counter() - began
                say(f"schedule auto: from step {step} on {choice}; measured, chosen in {seconds:.1f} s")
        name = world.gather(f"the schedule from step {step} on", told)[0]
        return rules.schedule if name == present else self._auto.hints[name]

    def _candidates(
        self,
        rules: StepRules,
        buckets: Sequence[Bucket],
        earlier: Iterable[RecordedStep],
        engine: Engine,
    ) -> dict[str, Candidate | str]:
        """The present hint and those that could take its place; of the others why not.

        Every process finds them, since for budgets all may have to be asked what their programs need.
        """
        table = measured(earlier)
        assert table is not None, "a step has run"
        costs = WorkloadCosts(table.workload([bucket_name(bucket) for bucket in buckets]), rules.placement)
        splits = _splits(rules)
        found: dict[str, Candidate | str] = {}
        for name, hint in ({rules.name: rules.schedule} | self._auto.hints).items():
            own = replace(rules, schedule=hint)
            try:
                if _splits(own) != splits:
                    found[name] = "it splits other backwards"
                    continue
                budgets = engine.memory.of_step(own, buckets).budgets
            except (ValueError, UsageError) as error:
                found[name] = str(error)
            else:
                found[name] = Candidate(rules=own, costs=costs, budgets=budgets)
        return found


def _splits(rules: StepRules) -> list[Sequence[frozenset[int]]]:
    return [rules.backward_kinds(stage) for stage in range(rules.placement.stages)]
