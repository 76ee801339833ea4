"""A virtual stage's programs on real arguments: forward, fused backward, and the backward's two halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from rrfp_jax.runtime.autodiff.differentiate import Differentiated
from rrfp_jax.runtime.autodiff.traced import SCALE, Program
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh
from rrfp_jax.runtime.programs.compiler import Compiled, Compiler
from rrfp_jax.runtime.sizes import nbytes


@dataclass(frozen=True)
class Halved:
    """A traced virtual stage, compiled, with the arguments of one microbatch.

    Attributes:
        traced: what to run.
        params: the parameters' values.
        arrived: those of carry and inputs.
        seed: of the cotangents that arrive.
    """

    traced: Differentiated
    params: Sequence[Any]
    arrived: Sequence[Any]
    seed: int = 0

    @cached_property
    def programs(self) -> dict[str, Program]:
        """Forward, fused backward, input, weight."""
        t = self.traced
        return {"forward": t.forward, "backward": t.backward, "input": t.input, "weight": t.weight}

    @cached_property
    def compiled(self) -> dict[str, Compiled]:
        """The same, each for itself."""
        compiler = Compiler(StageMesh((jax.local_devices()[0],)))
        return {name: compiler(p.__call__, *p.specs) for name, p in self.programs.items()}

    @cached_property
    def arguments(self) -> list[Any]:
        """The argument list of all programs, the input's outputs at its end."""
        prepare, values = self.traced.prepare, list(self.params)
        if prepare is not None:
            values += jax.jit(prepare.__call__)(*(values[i] for i in prepare.reads))
        values += self.arrived
        outputs = self._apply("forward", values)
        draw = np.random.default_rng(self.seed)
        arriving = [outputs[i] for i in self.traced.moving_out]
        values += [*outputs, *(jnp.asarray(draw.normal(size=a.shape), a.dtype) for a in arriving)]
        values.append(jnp.ones(SCALE.shape, SCALE.dtype))
        return [*values, *self._apply("input", values)]

    def run(self, name: str) -> list[Any]:
        """The outputs of a program."""
        return self._apply(name, self.arguments)

    def gradients(self) -> tuple[list[Any], list[Any]]:
        """Carry gradients and gradients, by the fused backward and by its halves."""
        flowing = len(self.traced.moving_in)
        return self.run("backward"), [*self.run("input")[:flowing], *self.run("weight")]

    def flops(self, name: str) -> float:
        """By XLA's analysis of the compiled program."""
        analysis: Any = self.compiled[name].cost_analysis()  # type: ignore[attr-defined]
        return float(analysis.get("flops", 0.0))

    def held_after_forward(self) -> int:
        """Bytes that a microbatch holds for its backward, split or not, before its cotangents arrive."""
        return self._read(["input", "weight"], self.traced.cotangents)

    def held_after_input(self) -> int:
        """Bytes that it holds for the parameters' gradients, cotangents and crossing values included."""
        return self._read(["weight"], len(self.arguments))

    def _read(self, names: Sequence[str], end: int) -> int:
        """Bytes of the arguments before `end` that programs read, besides parameters and prepared values."""
        read: dict[int, Any] = {}
        for program in map(self.programs.__getitem__, names):
            read.update(zip(program.reads, program.specs, strict=True))
        return sum(nbytes(spec) for i, spec in read.items() if self.traced.fixed <= i < end)

    def _apply(self, name: str, values: Sequence[Any]) -> list[Any]:
        found: list[Any] = self.compiled[name](*(values[i] for i in self.programs[name].reads))
        return found


def dot_flops(program: Any) -> int:
    """Operations of the matrix products in a traced program, loops and calls included."""
    total = 0
    for equation in getattr(program, "jaxpr", program).eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * prod(equation.outvars[0].aval.shape) * prod(left[i] for i in contracted)
        inner = sum(dot_flops(body) for body in jaxprs_in_params(equation.params))
        total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total
