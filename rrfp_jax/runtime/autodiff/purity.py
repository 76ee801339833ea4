"""What a traced function does besides computing: equations that must run once, and what is refused.

A backward computes again what it can have cheaply, and with rematerialisation whole layers. What is not
the same each time, such as a random draw that does not come from a key, would differ from the forward's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxprs_in_params

from rrfp_jax.errors import UsageError

_OPAQUE = frozenset(["pallas_call", "core_map", "run_state", "tpu_custom_call"])
"""Primitives whose programs have references of their own, which nobody outside sees."""

CALLBACKS = frozenset(["pure_callback", "io_callback"])
"""Primitives that ask a function on the host for values."""


def runs_once(equation: JaxprEqn) -> bool:
    """Whether what an equation gives must be saved and never computed again."""
    return any(inner.primitive.name in CALLBACKS or inner.effects for inner in _with_inner(equation))


def check_pure(closed: ClosedJaxpr) -> None:
    """Refuse a function that draws random numbers without a key, or reads and writes references.

    Prints, and other callbacks that give nothing back, are no harm; neither are functions on the host that
    are declared to be pure.

    Raises:
        UsageError: what it does, and what to do instead.
    """
    for equation in closed.jaxpr.eqns:
        for inner in _with_inner(equation):
            _check(inner)


def check_repeatable(names: Sequence[str], traced: Sequence[ClosedJaxpr], remat: str) -> None:
    """Refuse effects on the host in layers that are rematerialised; prints by jax.debug are no harm.

    Raises:
        UsageError: naming the layer and the setting.
    """
    for index, (name, own) in enumerate(zip(names, traced, strict=True)):
        if any(type(effect).__name__ in ("IOEffect", "OrderedIOEffect") for effect in own.effects):
            raise UsageError(
                f"layer {index} ({name}): calls io_callback, which JAX does not repeat in a backward, as "
                f"remat={remat!r} asks; take jax.debug.callback, or remat='none'"
            )


def _check(equation: JaxprEqn) -> None:
    name = equation.primitive.name
    if name == "rng_uniform":
        raise UsageError(
            "draws random numbers by lax.rng_uniform, which gives others when a backward computes it again; "
            "draw them from mb.key: jax.random.uniform(mb.key, shape)"
        )
    if name == "io_callback" and equation.outvars:
        raise UsageError(
            "takes values from io_callback, which may give others when a backward computes it again; make "
            "them part of the data, draw random numbers from mb.key, or take jax.pure_callback for a "
            "function whose results follow from its arguments"
        )
    if any(_is_reference(atom) for atom in (*equation.invars, *equation.outvars)):
        raise UsageError(
            "reads or writes a mutable reference (jax.new_ref), which a backward cannot repeat; compute "
            "with plain arrays, array.at[index].set(value), and pass on in the carry what later layers need"
        )


def _with_inner(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation and those of the programs that it calls."""
    yield equation
    if equation.primitive.name not in _OPAQUE:
        for body in jaxprs_in_params(equation.params):
            for inner in body.eqns:
                yield from _with_inner(inner)


def _is_reference(atom: Any) -> bool:
    return type(atom.aval).__name__ == "AbstractRef"
