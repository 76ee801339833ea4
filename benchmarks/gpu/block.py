"""Part 5: a transformer block as in a 7 B model (width 4096, 32 heads, SwiGLU 11008; arXiv:2302.13971).

rate          of products of large random bfloat16 matrices: what the card's matrix units give
<tokens>, <remat>
              seconds of forward (F) and fused backward (B) of one sequence, as shares of that rate, and of
              input (I) and weight gradients (W) apart; bytes as predicted (held by a microbatch, and XLA's
              analysis of the programs) beside `memory_stats()`

The block is `models.gpt.Block`, bfloat16 with float32 parameters; its attention makes the whole matrix of
scores.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import rrfp_jax as rrfp
from benchmarks.gpu.findings import Findings, Unavailable
from benchmarks.gpu.onestage import OneStage, Run, allocated, side_by_side
from benchmarks.gpu.work import Busy, milliseconds
from models import gpt

SEVEN_B = gpt.GPTConfig(d_model=4096, n_heads=32, d_ff=11008, n_layers=32, dtype=jnp.bfloat16)
TINY = gpt.GPTConfig(d_model=32, n_heads=4, d_ff=64, n_layers=2, dtype=jnp.bfloat16)


REMATS = ("full", "none")
"""In the order of what they allocate, so that each has a peak of its own."""


def forward_operations(model: gpt.GPTConfig, tokens: int) -> int:
    """Floating-point operations of the matrix products of one block's forward on one sequence."""
    weights = 4 * model.d_model**2 + 3 * model.d_model * model.d_ff
    scores_and_values = 2 * tokens * tokens * model.d_model
    return 2 * (weights * tokens + scores_and_values)


def times(run: Run, operations: int, rate: float, rounds: int) -> dict[str, Any]:
    """Milliseconds, and the share of the matrix rate; recomputation is not counted as operations."""
    seconds = run.seconds(rounds)
    return {
        **{f"{kind}_ms": milliseconds(time) for kind, time in seconds.items()},
        "F_share_of_rate": round(operations / seconds["F"] / rate, 3),
        "B_share_of_rate": round(2 * operations / seconds["B"] / rate, 3),
        "I_and_W_over_B": round((seconds["I"] + seconds["W"]) / seconds["B"], 3),
    }


def memory(stage: OneStage, run: Run) -> dict[str, Any]:
    """Bytes that a microbatch holds, and the peak of its forward and backward, predicted and allocated."""
    predicted = stage.predicted()
    found: dict[str, Any] = {"predicted": predicted}
    try:
        before, peak_before = allocated("bytes_in_use"), allocated("peak_bytes_in_use")
    except Unavailable as reason:
        return found | {"allocated": f"not measured: {reason}"}
    jax.block_until_ready(run.forward(run.fresh_input()))
    held = allocated("bytes_in_use") - before
    jax.block_until_ready(run.backward())
    peak = allocated("peak_bytes_in_use")
    found["allocated"] = {"held": held, "peak": peak if peak > peak_before else None}
    if peak <= peak_before:
        found["allocated"]["why_no_peak"] = f"{peak_before} bytes had been in use before"
    forward = predicted["input"] + predicted["forward_outputs"] + predicted["forward_temporary"]
    backward = predicted["held"] + predicted["backward_outputs"] + predicted["backward_temporary"]
    found["predicted"]["peak"] = before + max(forward, backward)
    return found


def measure(found: Findings) -> None:
    """See the module's text."""
    model, lengths = (TINY, (16,)) if found.quick else (SEVEN_B, (4096, 8192))
    with found.section("rate") as figures:
        busy = Busy.calibrated(256 if found.quick else 8192, jnp.bfloat16)
        figures["TFLOP_per_s"] = round(busy.rate / 1e12, 2)
        found.headline = f"{figures['TFLOP_per_s']:.0f} TFLOP/s"
    for tokens in lengths:
        carry = jax.ShapeDtypeStruct((1, tokens, model.d_model), model.dtype)
        layer = rrfp.layer(gpt.Block, model)
        compiled = side_by_side({remat: partial(OneStage.compile, layer, carry, remat) for remat in REMATS})
        for remat, stage in compiled.items():
            with found.section(f"{tokens} tokens, remat {remat}") as figures:
                run = stage.result().begin()
                figures["memory"] = memory(stage.result(), run)
                operations = forward_operations(model, tokens)
                figures.update(times(run, operations, busy.rate, 3 if found.quick else 15))
                del run  # its arrays, before the next case counts bytes
                if remat == "none":
                    found.headline += "; {} tokens: F {F_ms}, B {B_ms}, I {I_ms}, W {W_ms} ms".format(
                        tokens, **figures
                    )
