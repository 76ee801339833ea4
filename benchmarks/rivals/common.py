"""What this runtime's side and PyTorch's share: the null step's model, figures of runs. Needs no JAX, no
PyTorch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.harness import REPOSITORY, output_of
from benchmarks.steps import held_microbatches, simulated
from rrfp_jax.core.orders import ListedOrder
from rrfp_jax.trace.costs import Workload
from rrfp_jax.trace.records import StepTrace

ENVIRONMENT = REPOSITORY / ".venv-rivals"
RUN_SECONDS = 900.0

RANKS, MICROBATCHES = 2, 8
"""Of the null step: processes, one stage each; and what a step has of them."""

ROWS, WIDTH, LAYERS = 4, 64, 4
"""Of the null step: a microbatch has `ROWS` x `WIDTH` float32; a layer is a matrix, a bias and tanh."""

LEARNING_RATE, WARM_UP, STEPS = 1e-3, 20, 200


class Timed(NamedTuple):
    """What some steps of one schedule took.

    Attributes:
        step: from the start of its first task to the end of its last one, over all stages; median (s).
        order: what the tasks of the last step take in the order in which they ran, if messages and whoever
            handles them take no time (s). What is beyond that, is theirs.
        held: most microbatches that a stage held, a chunk counting as its part of one.
    """

    step: float
    order: float
    held: float


def timed(traces: Sequence[StepTrace], workload: Workload) -> Timed:
    """The figures of some steps whose tasks take what a workload says."""
    last = traces[-1]
    ran = tuple(tuple(last.order(stage)) for stage in range(last.stages))
    order = ListedOrder(last.placement, workload.microbatches, ran)
    alone = simulated(order, workload, accumulation="arrival")  # whatever was added when is in the order
    held = max(map(held_microbatches, traces))
    return Timed(median(trace.makespan for trace in traces), alone.makespan, held)


def torch_finds(what: str, question: Any) -> Any:
    """What `torch_schedules.py` answers where PyTorch is; it is given a file for each, as JSON."""
    with tempfile.TemporaryDirectory() as name:
        asked, answered = Path(name) / "question.json", Path(name) / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        python = str(ENVIRONMENT / "bin" / "python")
        command = [python, "-m", "benchmarks.rivals.torch_schedules", what, str(asked), str(answered)]
        output_of(command, RUN_SECONDS)
        return json.loads(answered.read_text(encoding="utf-8"))


def require_torch() -> None:
    """End this command if the environment was never set up."""
    if not (ENVIRONMENT / ".installed").exists():
        sys.exit(f"PyTorch is missing, so nothing was compared: `make rivals` sets up {ENVIRONMENT.name}")
