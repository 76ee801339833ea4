"""The compiled programs of one stage for one shape bucket, and the update of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

from rrfp_jax.runtime.differentiate import Differentiated, Program, Specs, differentiate, reduce
from rrfp_jax.runtime.layers import Params
from rrfp_jax.runtime.pipeline import IDS, LayerShapes, Pipeline, run_layers
from rrfp_jax.runtime.pipeline import Specs as Fields

Compiled: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """One stage's piece of the model for microbatches of given fields; specs only.

    `params` is {layer index as text: nested dict}; flat lists of parameters are in its leaf order.
    """

    pipe: Pipeline
    layers: range
    fields: Fields
    shapes: Sequence[LayerShapes]  # of all layers

    @cached_property
    def params(self) -> Params:
        """Specs of the stage's parameters."""
        return {str(i): self.shapes[i].params for i in self.layers}

    @cached_property
    def carry_in(self) -> Any:
        """Specs of what arrives from the stage before (None on the first stage)."""
        return self.shapes[self.layers.start].carry_in

    @property
    def input_names(self) -> list[str]:
        """The fields in the order of a program's inputs; the numbers for random keys come after them."""
        return sorted(self.fields)

    @cached_property
    def statistics(self) -> list[str]:
        """What the statistics vector holds: total, weight, metrics; empty if there is no loss here."""
        loss = jax.eval_shape(
            lambda *a: self._run(*a)[1],
            [self.params[str(i)] for i in self.layers],
            self.carry_in,
            dict(self.fields),
            IDS,
        )
        return ["total", "weight", *sorted(loss.metrics)] if loss is not None else []

    def _run(self, params: Any, carry: Any, fields: Any, ids: Any, training: bool = True) -> Any:
        return run_layers(self.pipe, self.layers, params, carry, fields, ids, training=training)

    def flat(
        self, params: Sequence[Any], carry: Sequence[Any], inputs: Sequence[Any], training: bool = True
    ) -> tuple[Any, Any, Any]:
        """The stage as a function of flat lists; see `differentiate.StageFunction`."""
        tree = jax.tree.unflatten(jax.tree.structure(self.params), params)
        carry = jax.tree.unflatten(jax.tree.structure(self.carry_in), carry)
        fields = dict(zip(self.input_names, inputs, strict=False))
        out, loss = self._run([tree[str(i)] for i in self.layers], carry, fields, inputs[-1], training)
        if loss is None:
            return jax.tree.leaves(out), None, None
        numbers = [loss.total, loss.weight, *(loss.metrics[name] for name in sorted(loss.metrics))]
        return jax.tree.leaves(out), loss.total, jnp.stack([jnp.asarray(n, jnp.float32) for n in numbers])

    def specs(self) -> tuple[Specs, Specs, Specs]:
        """Flat specs of parameters, carry and inputs."""
        inputs = [*(self.fields[name] for name in self.input_names), IDS]
        return jax.tree.leaves(self.params), jax.tree.leaves(self.carry_in), inputs


@dataclass(frozen=True)
class Reads:
    """Which arguments a program takes, sorted into those fixed for a step and those of a microbatch.

    A full argument list begins with `fixed` entries (parameters, prepared values).
    """

    program: Program
    fixed: int

    @cached_property
    def head(self) -> list[int]:
        """Indices into parameters and prepared values."""
        return [i for i in self.program.reads if i < self.fixed]

    @cached_property
    def tail(self) -> list[int]:
        """Indices into what follows them."""
        return [i - self.fixed for i in self.program.reads if i >= self.fixed]


@dataclass(frozen=True, kw_only=True)
class StagePrograms:
    """What a stage runs for one bucket: compiled programs with the arguments that each one reads.

    Attributes:
        inputs: indices of the inputs (fields, then numbers) that forward or backward reads.
        held_bytes: bytes that one microbatch keeps on the stage between its forward and its backward,
            parameters and prepared values not counted.
    """

    traced: Differentiated
    prepare: Compiled | None
    forward: Compiled | None  # None if the stage has nothing to give
    backward: Compiled | None
    forward_reads: Reads
    backward_reads: Reads
    statistics: Sequence[str]
    backward_keeps: Sequence[int]  # into carry, inputs and the forward's outputs
    backward_cotangents: Sequence[int]
    inputs: frozenset[int]
    held_bytes: int
    temporary_bytes: int

    @classmethod
    def compile(cls, shape: StageShape, device: jax.Device) -> StagePrograms:
        """Trace and compile the training programs of one stage."""
        params, carry, inputs = shape.specs()
        traced = differentiate(shape.flat, params, carry, inputs)
        prepared = len(traced.prepare.closed.jaxpr.outvars) if traced.prepare else 0
        fixed = len(params) + prepared
        forward, backward = Reads(traced.forward, fixed), Reads(traced.backward, fixed)
        outputs = [var.aval for var in traced.forward.closed.jaxpr.outvars]
        arguments = [*carry, *inputs, *outputs]
        keeps = [i for i in backward.tail if i < len(arguments)]
        used = {i - len(carry) for i in (*forward.tail, *keeps)}
        compiled = [
            _compile(program, device) if program is not None else None
            for program in (traced.prepare, traced.forward, traced.backward)
        ]
        return cls(
            traced=traced,
            prepare=compiled[0],
            forward=compiled[1],
            backward=compiled[2],
            forward_reads=forward,
            backward_reads=backward,
            statistics=shape.statistics,
            backward_keeps=keeps,
            backward_cotangents=[i - len(arguments) for i in backward.tail if i >= len(arguments)],
            inputs=frozenset(used) & frozenset(range(len(inputs))),
            held_bytes=sum(nbytes(arguments[i]) for i in keeps),
            temporary_bytes=max(_temporary_bytes(program) for program in compiled),
        )


@dataclass(frozen=True, kw_only=True)
class EvaluationProgram:
    """A stage's forward without residuals; `reads` has no prepared values."""

    forward: Compiled | None
    reads: Reads
    statistics: Sequence[str]
    inputs: frozenset[int]
    out: int

    @classmethod
    def compile(cls, shape: StageShape, device: jax.Device) -> EvaluationProgram:
        """Trace and compile."""
        params, carry, inputs = shape.specs()
        n, m, out = len(params), len(params) + len(carry), 0

        def forward(*args: Any) -> list[Any]:
            nonlocal out
            leaves, _, statistics = shape.flat(args[:n], args[n:m], args[m:], training=False)
            out = len(leaves)
            return [*leaves, *([] if statistics is None else [statistics])]

        program = reduce(jax.make_jaxpr(forward)(*params, *carry, *inputs))
        reads = Reads(program, n)
        used = frozenset(i - len(carry) for i in reads.tail) & frozenset(range(len(inputs)))
        return cls(
            forward=_compile(program, device), reads=reads, statistics=shape.statistics, inputs=used, out=out
        )


@dataclass(frozen=True, kw_only=True)
class UpdatePrograms:
    """What does not depend on the bucket: adding gradients, their norm, and the optimizer.

    zeros       -> accumulators, all zero
    init        parameters -> optimizer state
    accumulate  accumulators, gradients -> accumulators          (accumulators donated)
    norm        accumulators -> sum of squares, float32 scalar
    update      parameters, optimizer state, accumulators, scale -> parameters, state, zeroed accumulators
                (all donated); gradients are the accumulators times `scale`, a float32 scalar

    Accumulators are float32 or wider whatever the parameters are: they hold sums over many microbatches.
    """

    zeros: Compiled
    accumulate: Compiled
    norm: Compiled
    init: Compiled | None
    update: Compiled | None
    state_structure: Any

    @classmethod
    def compile(
        cls, params: Params, optimizer: optax.GradientTransformation | None, device: jax.Device
    ) -> UpdatePrograms:
        """Trace and compile for a stage's parameter tree; without an optimizer there is no update."""
        leaves, structure = jax.tree.flatten(params)
        wide = [jax.ShapeDtypeStruct(s.shape, jnp.promote_types(s.dtype, jnp.float32)) for s in leaves]

        def accumulate(sums: list[Any], gradients: list[Any]) -> list[Any]:
            return [a + g.astype(a.dtype) for a, g in zip(sums, gradients, strict=True)]

        def norm(sums: list[Any]) -> Any:
            return sum((jnp.sum(jnp.square(a.astype(jnp.float32))) for a in sums), jnp.zeros((), jnp.float32))

        def build(function: Any, donate: tuple[int, ...], *specs: Any) -> Compiled:
            placed = jax.tree.map(lambda s: _placed(s, device), specs)
            where = SingleDeviceSharding(device)
            return jax.jit(function, donate_argnums=donate, out_shardings=where).lower(*placed).compile()

        def zeros() -> list[Any]:
            return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in wide]

        init = update = state_structure = None
        if optimizer is not None:
            state, state_structure = jax.tree.flatten(jax.eval_shape(optimizer.init, params))

            def step(old: list[Any], state: list[Any], sums: list[Any], scale: Any) -> tuple[Any, Any, Any]:
                own = jax.tree.unflatten(structure, old)
                gradients = jax.tree.unflatten(
                    structure, [(a * scale).astype(o.dtype) for a, o in zip(sums, old, strict=True)]
                )
                changes, after = optimizer.update(gradients, jax.tree.unflatten(state_structure, state), own)
                new = jax.tree.leaves(optax.apply_updates(own, changes))
                return new, jax.tree.leaves(after), [jnp.zeros_like(a) for a in sums]

            scalar = jax.ShapeDtypeStruct((), jnp.float32)
            init = build(lambda p: jax.tree.leaves(optimizer.init(p)), (), params)
            update = build(step, (0, 1, 2), leaves, state, wide, scalar)
        return cls(
            zeros=build(zeros, ()),
            accumulate=build(accumulate, (0,), wide, leaves),
            norm=build(norm, (), wide),
            init=init,
            update=update,
            state_structure=state_structure,
        )


def nbytes(spec: Any) -> int:
    """Bytes of an array or spec."""
    return int(spec.size) * int(spec.dtype.itemsize)


def _placed(spec: Any, device: jax.Device) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=SingleDeviceSharding(device))


def _compile(program: Program, device: jax.Device) -> Compiled | None:
    if not program.closed.jaxpr.outvars:
        return None
    specs = [_placed(spec, device) for spec in program.specs]
    return jax.jit(program.__call__, out_shardings=SingleDeviceSharding(device)).lower(*specs).compile()


def _temporary_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis() if compiled is not None else None
    return int(analysis.temp_size_in_bytes) if analysis is not None else 0
