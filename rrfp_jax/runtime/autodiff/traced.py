"""Traced programs that read a part of an argument list, and which of their equations are cheap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from rrfp_jax.errors import UsageError
from rrfp_jax.random_keys import as_key, is_key, plain
from rrfp_jax.runtime._jax import live_part

Specs: TypeAlias = Sequence[jax.ShapeDtypeStruct]

CHEAP = frozenset(
    [
        *("add", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "integer_pow", "clamp"),
        *("select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
        *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy"),
    ]
)
"""Elementwise primitives whose results are computed again rather than saved (no transcendental ones)."""

REPEATABLE = CHEAP | {
    *("add_any", "iota", "transpose", "rev", "slice", "concatenate", "split", "pad"),
}
"""These, and moves: what both halves of a split backward may do."""


def calls_programs(equation: JaxprEqn) -> bool:
    """Whether an equation is control flow, or calls another program."""
    return any(True for _ in jaxprs_in_params(equation.params))


def is_repeatable(equation: JaxprEqn) -> bool:
    """Whether several programs may compute an equation; those that make random keys are, too.

    No program gives another one typed keys: they are made again from their numbers.
    """
    makes_keys = all(is_key(var.aval) for var in equation.outvars) and not calls_programs(equation)
    return equation.primitive.name in REPEATABLE or makes_keys


SCALE = jax.ShapeDtypeStruct((), np.float32)
"""Spec of the loss scale: the loss's own cotangent, by which a traced backward begins."""


@dataclass(frozen=True)
class Program:
    """A traced program and which entries of its full argument list it reads."""

    closed: ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, *args: Any) -> list[Any]:
        """Apply it to the arguments that it reads."""
        return jaxpr_as_fun(self.closed)(*args)  # type: ignore[no-any-return]

    def at(self, places: Sequence[int]) -> Program:
        """The program, given where in the full list each entry of the list that it reads now is."""
        return Program(self.closed, tuple(places[i] for i in self.reads))

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of the arguments that it reads."""
        return [spec_of(var) for var in self.closed.jaxpr.invars]

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Specs of what it gives."""
        return [spec_of(var) for var in self.closed.jaxpr.outvars]


def spec_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The spec of a variable's or literal's value; weak types stay weak, as promotion depends on them."""
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def reduce(closed: ClosedJaxpr, outputs: Sequence[bool] | None = None) -> Program:
    """The program with only the chosen outputs, and no more inputs than they need."""
    live, reads = live_part(closed, outputs or [True] * len(closed.jaxpr.outvars))
    return Program(live, tuple(reads))


def with_given(
    closed: ClosedJaxpr, outputs: Sequence[Any], known: Sequence[Var] = (), at: int = 0, quiet: bool = False
) -> Program:
    """The program with other outputs, and the values of `known` as further inputs from position `at` on.

    A quiet program lacks equations that its outputs do not need, such as a print, which `reduce` keeps: what
    is computed apart from the forward must not read a microbatch, or print, for the sake of one.
    """
    jaxpr, given, equations = closed.jaxpr, set(known), list[JaxprEqn]()
    for equation in jaxpr.eqns:
        if not any(var in given for var in equation.outvars):
            equations.append(equation)
        elif not all(var in given or isinstance(var, DropVar) for var in equation.outvars):
            rest = [DropVar(var.aval) if var in given else var for var in equation.outvars]
            equations.append(equation.replace(outvars=rest))
    if quiet:
        equations = _needed(equations, outputs)
    inputs = [*jaxpr.invars[:at], *known, *jaxpr.invars[at:]]
    own = jaxpr.replace(invars=inputs, outvars=list(outputs), eqns=equations)
    return reduce(ClosedJaxpr(own, closed.consts))


def _needed(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    needed = {atom for atom in outputs if not isinstance(atom, Literal)}
    kept = []
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return kept[::-1]


def dependence(closed: ClosedJaxpr) -> dict[Var, int]:
    """For every variable of the program, the mask of the inputs that can change it.

    What a function on the host gives, and all that follows from it, has one more bit, `1 << len(inputs)`: it
    follows from more than the inputs.
    """
    jaxpr = closed.jaxpr
    known: dict[Var, int] = {var: 1 << i for i, var in enumerate(jaxpr.invars)}
    known.update((var, 0) for var in jaxpr.constvars)
    host = 1 << len(jaxpr.invars)
    for equation in jaxpr.eqns:
        more = host if runs_once(equation) else 0
        masks = [mask | more for mask in _outputs(jaxpr, equation, known)]
        known.update(zip(equation.outvars, masks, strict=True))
    return known


def output_dependence(closed: ClosedJaxpr) -> list[int]:
    """The mask of every output of the program."""
    known = dependence(closed)
    return [0 if isinstance(atom, Literal) else known[atom] for atom in closed.jaxpr.outvars]


def _outputs(jaxpr: Any, equation: Any, known: dict[Var, int]) -> list[int]:
    """The masks of an equation's outputs; of a call or loop, each output's own."""
    read = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    together = _union(known[var] for var in read)
    outputs = equation.outvars
    distinct = {known[var] for var in read if known[var]}
    if len(outputs) == 1 or len(distinct) < 2 or not any(True for _ in jaxprs_in_params(equation.params)):
        return [together] * len(outputs)
    masks = []
    for var in outputs:
        if isinstance(var, DropVar):
            masks.append(0)
            continue
        alone = jaxpr.replace(constvars=[], invars=read, outvars=[var], eqns=[equation])
        _, live = live_part(ClosedJaxpr(alone, []), [True])
        masks.append(_union(known[read[i]] for i in live))
    return masks


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


BARRIER = "optimization_barrier"

_CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
"""Primitives that only call a program, and the parameter in which it is."""


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program, and no equation of it calls another one (control flow stays as it is).

    Typed keys among the inputs, and from control flow, are made again of their numbers, so that other
    programs can be given the numbers.
    """
    inliner = _Inliner()
    inputs = [Var(var.aval) for var in closed.jaxpr.invars]
    outputs = inliner.call(closed, [inliner.made_again(var) for var in inputs])
    constants = list(inliner.constants)
    flat = closed.jaxpr.replace(constvars=constants, invars=inputs, outvars=outputs, eqns=inliner.equations)
    return ClosedJaxpr(flat, [inliner.constants[var] for var in constants])


def without_barriers(flat: ClosedJaxpr) -> ClosedJaxpr:
    """An inlined program without what only orders its work."""
    names: dict[Any, Any] = {}
    equations = []
    for equation in flat.jaxpr.eqns:
        read = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in equation.invars]
        if equation.primitive.name == BARRIER:
            names.update(zip(equation.outvars, read, strict=True))
        else:
            equations.append(equation.replace(invars=read))
    outputs = [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in flat.jaxpr.outvars]
    return ClosedJaxpr(flat.jaxpr.replace(eqns=equations, outvars=outputs), flat.consts)


class _Inliner:
    """Collects equations; every call gets variables of its own."""

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self.constants: dict[Var, Any] = {}

    def call(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        """Append the program's equations applied to `args`; its outputs."""
        jaxpr = closed.jaxpr if isinstance(closed, ClosedJaxpr) else closed
        consts = closed.consts if isinstance(closed, ClosedJaxpr) else []
        known: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            known[var] = Var(var.aval)
            self.constants[known[var]] = value
        for equation in jaxpr.eqns:
            read = [atom if isinstance(atom, Literal) else known[atom] for atom in equation.invars]
            known.update(zip(equation.outvars, self._apply(equation, read), strict=True))
        return [atom if isinstance(atom, Literal) else known[atom] for atom in jaxpr.outvars]

    def _apply(self, equation: JaxprEqn, read: list[Any]) -> Sequence[Any]:
        parameter = _CALLS.get(equation.primitive.name)
        if parameter is None:
            made = [(DropVar if isinstance(v, DropVar) else Var)(v.aval) for v in equation.outvars]
            self.equations.append(equation.replace(invars=read, outvars=made))
            return [*map(self.made_again, made)] if calls_programs(equation) else made
        if equation.params.get("differentiated"):
            read = self._behind_barrier(read, equation.params["prevent_cse"])
        return self.call(equation.params[parameter], read)

    def made_again(self, var: Var) -> Any:
        """A key made again of its numbers; anything else as it is."""
        if not is_key(var.aval) or isinstance(var, DropVar):
            return var
        again = jax.make_jaxpr(lambda key: as_key(var.aval, plain(key)))(var.aval)
        return self.call(again, [var])[0]

    def _behind_barrier(self, read: list[Any], chosen: bool | Sequence[bool]) -> list[Any]:
        flags = [chosen] * len(read) if isinstance(chosen, bool) else chosen
        held = [i for i, flag in enumerate(flags) if flag and not isinstance(read[i], Literal)]
        specs = [spec_of(read[i]) for i in held]
        barrier = jax.make_jaxpr(jax.lax.optimization_barrier)(specs)
        behind = list(read)
        for i, atom in zip(held, self.call(barrier, [read[i] for i in held]), strict=True):
            behind[i] = atom
        return behind


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
