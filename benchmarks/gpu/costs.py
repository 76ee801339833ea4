"""Part 6: what one layer of full-size models costs, as a table for the simulator: DIR/costs.json.

Decoder layers by tokens of a microbatch, in sequences no longer than the model's; encoder layers by images.
Forward and backward, fused and split, as the runtime runs them, bfloat16 with float32 parameters. Attention
is cuDNN's where it can be had, which each row says, with the reason where it cannot. The format is in
results/gpu.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax

import rrfp_jax as rrfp
from benchmarks.gpu.check import Findings, write_json
from benchmarks.gpu.configurations import DECODERS, ENCODERS, TINY_DECODER, TINY_ENCODER, Published
from benchmarks.gpu.onestage import OneStage, side_by_side
from benchmarks.gpu.work import has_nvidia_gpu
from benchmarks.harness import machine
from models.decoder import Block

COSTS = "costs.json"
TOKENS, IMAGES = (2048, 4096, 8192), (1, 4, 16)
RESERVE_SECONDS = 4.0
"""A row is not begun with less time left than this."""


@dataclass(frozen=True)
class Row:
    """A layer with a microbatch of so many sequences or images of so many tokens each."""

    of: Published
    count: int
    length: int

    @classmethod
    def decoder(cls, of: Published, tokens: int) -> Row:
        """A microbatch of that many tokens, in sequences as long as the model takes."""
        length = min(tokens, of.tokens)
        return cls(of, tokens // length, length)

    @property
    def name(self) -> str:
        return f"{self.of.name}, {self.count} x {self.length} tokens"

    def compile(self, attention: Literal["xla", "cudnn"]) -> OneStage:
        model = replace(self.of.model, attention=attention)
        spec = jax.ShapeDtypeStruct((self.count, self.length, model.d_model), model.dtype)
        return OneStage.compile(rrfp.layer(Block, model), spec)

    def as_json_object(self) -> dict[str, Any]:
        kind = ("decoder", "sequences") if self.of.model.causal else ("encoder", "images")
        return {
            "model": self.of.name,
            "layer": kind[0],
            "layers_in_model": self.of.model.n_layers,
            kind[1]: self.count,
            "tokens": self.count * self.length,
            "source": self.of.source,
        }


def compiled(row: Row) -> tuple[OneStage, dict[str, Any]]:
    """The row's programs, and with which attention; the failure of the better one is told, not hidden."""
    if not has_nvidia_gpu():
        return row.compile("xla"), {"attention": "xla"}
    try:
        return row.compile("cudnn"), {"attention": "cudnn"}
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return row.compile("xla"), {"attention": "xla", "why_not_cudnn": reason}


def measured(stage: OneStage, rounds: int) -> dict[str, Any]:
    seconds = stage.begin().seconds(rounds)
    predicted = stage.predicted()
    temporary = max(predicted["forward_temporary"], predicted["backward_temporary"])
    return {
        "parameters": stage.parameters,
        "forward": seconds["F"],
        "backward": seconds["B"],
        "backward_input": seconds["I"],
        "backward_weight": seconds["W"],
        "held_bytes": predicted["held"],
        "held_after_input_bytes": predicted["held_after_input"],
        "temporary_bytes": temporary,
    }


def batches(quick: bool) -> list[list[Row]]:
    """The rows, in batches that are compiled side by side."""
    if quick:
        return [[Row.decoder(TINY_DECODER, 32), Row(TINY_ENCODER, 2, TINY_ENCODER.tokens)]]
    return [
        [Row.decoder(of, tokens) for of in DECODERS for tokens in TOKENS],
        [Row(of, images, of.tokens) for of in ENCODERS for images in IMAGES],
    ]


def measure(found: Findings) -> None:
    table: dict[str, Any] = {
        "format": "layer costs 1",
        "unit": "s",
        "quick": found.quick,
        "machine": machine(),
        "layers": [],
    }
    for rows in batches(found.quick):
        # None is timed while another one is compiled and tuned.
        programs = side_by_side({row.name: partial(compiled, row) for row in rows})
        for row in rows:
            if found.seconds_left < RESERVE_SECONDS and not found.quick:
                found.too_late(row.name)
                continue
            with found.section(row.name) as figures:
                stage, how = programs.pop(row.name).result()
                cost = row.as_json_object() | how | measured(stage, 3 if found.quick else 10)
                table["layers"].append(cost)
                figures.update({name: cost[name] for name in ("forward", "backward", "attention")})
            write_json(found.folder / COSTS, table)
        found.headline = f"{len(table['layers'])} rows in {COSTS}"
