"""Part 3: what the runtime costs on one device, where four stages cannot wait for each other.

tokens      tokens/s of the pipeline and of three other ways to do the same step (benchmarks/host.py);
            aim: at least 0.97 of the faster hand-written loop, with 1 B parameters and 4096 tokens a
            microbatch, bfloat16 with float32 parameters, AdamW
gaps        from the traces of the same steps: the share of a step in which the device had nothing to do,
            as the host sees it, and the time between steps
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import rrfp_jax as rrfp
from benchmarks.gpu.check import Findings
from benchmarks.harness import Aim
from benchmarks.host import Tax, TaxCase
from models import gpt
from rrfp_jax.trace.records import StepTrace

MESH = rrfp.Mesh(pp=4, share_devices=True)
# Few wide blocks, one a stage, instead of many narrow ones: as many parameters, and a quarter to compile.
BILLION = gpt.GPTConfig(
    d_model=4096, n_heads=32, d_ff=11008, n_layers=4, vocab_size=32000, dtype=jnp.bfloat16
)
FULL = TaxCase(model=BILLION, microbatches=8, batch=4, length=1024, mesh=MESH)
TINY = gpt.GPTConfig(d_model=16, n_heads=2, d_ff=32, n_layers=2, vocab_size=32)
QUICK = TaxCase(model=TINY, microbatches=6, batch=2, length=8, mesh=MESH)

LEAST_SHARE = 0.97
LONG_GAP_SECONDS = 2e-5


def gaps(traces: Sequence[StepTrace]) -> dict[str, Any]:
    """Idle time of the one device between the tasks of all stages; gaps over 20 us are long."""
    found = []
    for trace in traces:
        free = trace.start
        for record in sorted(trace.records, key=lambda record: record.start):
            if record.start > free:
                found.append(record.start - free)
            free = max(free, record.end)
    span = sum(trace.makespan for trace in traces)
    long = [gap for gap in found if gap > LONG_GAP_SECONDS]
    return {
        "idle_percent_of_step": round(100 * sum(found) / span, 3),
        "tasks_per_step": len(traces[0].records),
        "long_gaps_per_step": round(len(long) / len(traces), 1),
        "median_long_gap_us": round(1e6 * float(np.median(long)), 1) if long else None,
        "longest_gap_us": round(1e6 * max(found, default=0.0), 1),
        "step_ms": round(1e3 * float(np.median([trace.makespan for trace in traces])), 3),
    }


def measure(found: Findings) -> None:
    case = QUICK if found.quick else FULL
    with found.section("tokens") as figures:
        tax = Tax(case)
        figures["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(tax.params))
        figures["tokens_per_microbatch"] = case.batch * case.length
        seconds = tax.measure(2 if found.quick else 10)
        share = 1 / (1 + seconds["tax_percent"] / 100)
        ways = ("pipeline", "programs", "fused", "apart")
        figures["seconds_per_step"] = {way: seconds[way] for way in ways}
        figures["tokens_per_second"] = {way: round(case.tokens / seconds[way], 1) for way in ways}
        figures["share_of_the_faster_hand_written_loop"] = round(share, 4)
        figures.update({n: round(s, 2) for n, s in seconds.items() if n.endswith("percent")})
        found.headline = f"{share:.3f} of the faster hand-written loop"
        found.aim(Aim("tokens/s over the faster hand-written loop's", share, LEAST_SHARE, "", at_least=True))
    with found.section("gaps") as figures:
        figures.update(gaps(tax.traces))
        outside = seconds["pipeline"] - 1e-3 * figures["step_ms"]
        figures["outside_the_tasks_ms"] = round(1e3 * outside, 3)  # loading, sums, the update
        found.headline += f"; device idle for {figures['idle_percent_of_step']:.1f} % of the tasks' time"
