"""Traced programs: what they read, which equations are cheap, on which inputs each value depends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from operator import or_
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, jaxprs_in_params

from rrfp_jax.errors import UsageError
from rrfp_jax.random_keys import as_key, is_key, plain
from rrfp_jax.runtime._jax import call, live_part, scan_counts

Specs: TypeAlias = Sequence[jax.ShapeDtypeStruct]

CHEAP: Set[str] = {
    *("add", "sub", "mul", "div", "neg", "max", "min", "abs", "sign", "square", "integer_pow", "clamp"),
    *("select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor"),
    *("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy"),
    "one_minus_square",  # jax 0.12: of derivatives, as of tanh
}
"""Elementwise primitives whose results are computed again rather than saved (no transcendental ones)."""

REPEATABLE = CHEAP | {*("add_any", "iota", "transpose", "rev", "slice", "concatenate", "split", "pad")}
"""These, and moves: what both halves of a split backward may do."""


_ROUNDING = frozenset(["add", "add_any", "sub", "mul", "div", "square", "integer_pow", "one_minus_square"])


def jumps(equation: JaxprEqn) -> bool:
    """Whether the least change of a number that an equation reads may change all, as in a comparison.

    Such numbers must be those of the forward to the bit. In another program XLA may round them otherwise:
    it takes a product by the reciprocal for a quotient, keeps the bits of float32 between operations on
    bfloat16, and fuses products with sums. The gradient of `max(y, 0)`, which asks where y is the maximum,
    would then be 0.
    """
    reads = any(map(is_inexact, equation.invars))
    return reads and (equation.primitive.name == "sign" or not any(map(is_inexact, equation.outvars)))


def is_exact(equation: JaxprEqn) -> bool:
    """Whether all programs get the same bits of an equation, given the same operands."""
    name, made = equation.primitive.name, [*filter(is_inexact, equation.outvars)]
    if name == "convert_element_type" and made:
        sizes = [atom.aval.dtype.itemsize for atom in (equation.invars[0], made[0])]  # type: ignore[attr-defined]
        return not is_inexact(equation.invars[0]) or sizes[0] < sizes[1]
    return not made or (name in REPEATABLE and name not in _ROUNDING)


def is_inexact(atom: Any) -> bool:
    """Whether values of its dtype are rounded, and have tangents."""
    return bool(jnp.issubdtype(getattr(atom.aval, "dtype", bool), jnp.inexact))


def calls_programs(equation: JaxprEqn) -> bool:
    """Whether an equation is control flow, or calls another program."""
    return any(True for _ in jaxprs_in_params(equation.params))


def is_repeatable(equation: JaxprEqn) -> bool:
    """Whether several programs may compute an equation; typed keys are always made again from numbers."""
    makes_keys = all(is_key(var.aval) for var in equation.outvars) and not calls_programs(equation)
    return (equation.primitive.name in REPEATABLE and not jumps(equation)) or makes_keys


def made_of(given: Iterable[Any], equations: Iterable[JaxprEqn]) -> set[Any]:
    """The variables given, and those that these equations make of nothing else."""
    found = set(given)
    for equation in equations:
        if found.issuperset(v for v in equation.invars if not isinstance(v, Literal)):
            found.update(equation.outvars)
    return found


SCALE = jax.ShapeDtypeStruct((), np.float32)
"""Spec of the loss scale: the loss's own cotangent, by which a traced backward begins."""


@dataclass(frozen=True)
class Program:
    """A traced program and which entries of its full argument list it reads."""

    closed: ClosedJaxpr
    reads: tuple[int, ...]

    def __call__(self, *args: Any) -> list[Any]:
        """Apply it to the arguments that it reads."""
        return call(self.closed, *args)

    def at(self, places: Sequence[int] | Mapping[int, int]) -> Program:
        """The program, given where in the full list each entry of the list that it reads now is."""
        return Program(self.closed, tuple(places[i] for i in self.reads))

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        return [spec_of(var) for var in self.closed.jaxpr.invars]

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        return [spec_of(var) for var in self.closed.jaxpr.outvars]


def spec_of(atom: Any) -> jax.ShapeDtypeStruct:
    """The spec of a variable's or literal's value; weak types stay weak, as promotion depends on them."""
    aval = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def reduce(closed: ClosedJaxpr, outputs: Sequence[bool] | None = None) -> Program:
    """The program with only the chosen outputs, and no more inputs than they need."""
    live, reads = live_part(closed, outputs or [True] * len(closed.jaxpr.outvars))
    return Program(live, tuple(reads))


def without_outputs(program: Program, outputs: Collection[int]) -> Program:
    """The program without some of its outputs, and what only they need."""
    count = len(program.closed.jaxpr.outvars)
    return reduce(program.closed, [i not in outputs for i in range(count)]).at(program.reads)


def scalars_too(program: Program) -> Program:
    """The program that also gives the numbers which it computes and puts together with arrays."""
    jaxpr = program.closed.jaxpr
    shape = {v: getattr(v.aval, "shape", None) for equation in jaxpr.eqns for v in equation.outvars}
    made = {v for v, own in shape.items() if own == ()}
    arrays = [equation for equation in jaxpr.eqns if any(shape[v] for v in equation.outvars)]
    found = dict.fromkeys(v for own in arrays for v in own.invars if isinstance(v, Var) and v in made)
    outputs = [*jaxpr.outvars, *(v for v in found if v not in jaxpr.outvars)]
    return Program(ClosedJaxpr(jaxpr.replace(outvars=outputs), program.closed.consts), program.reads)


def parts(closed: ClosedJaxpr, outputs: Sequence[Sequence[int]]) -> list[Program]:
    """For each list of outputs what `reduce` gives, in one pass over the program."""
    jaxpr, own, every = closed.jaxpr, [list[JaxprEqn]() for _ in outputs], (1 << len(outputs)) - 1
    wanted: dict[Var, int] = {}  # by variable, the mask of the parts that need it

    def want(atoms: Sequence[Any], mask: int) -> None:
        for atom in atoms:
            if not isinstance(atom, Literal):
                wanted[atom] = wanted.get(atom, 0) | mask

    results = [[jaxpr.outvars[i] for i in places] for places in outputs]
    for k, atoms in enumerate(results):
        want(atoms, 1 << k)
    for equation in reversed(jaxpr.eqns):
        mask = functools.reduce(or_, (wanted.get(var, 0) for var in equation.outvars), 0)
        mask = every if equation.effects else mask
        want(equation.invars, mask)
        for k in bits(mask):
            own[k].append(equation)
    cut = (jaxpr.replace(outvars=atoms, eqns=of[::-1]) for atoms, of in zip(results, own, strict=True))
    return [reduce(ClosedJaxpr(one, closed.consts)) for one in cut]


def bits(mask: int) -> list[int]:
    """The places of the bits of a mask."""
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


def with_given(
    closed: ClosedJaxpr, outputs: Sequence[Any], known: Sequence[Var] = (), at: int = 0, quiet: bool = False
) -> Program:
    """The program with other outputs, and the values of `known` as further inputs from position `at` on.

    A quiet program lacks equations that its outputs do not need, such as a print, which `reduce` keeps: what
    is computed apart from the forward must not read a microbatch, or print, for the sake of one.
    """
    jaxpr, given, equations = closed.jaxpr, set(known), list[JaxprEqn]()
    for equation in jaxpr.eqns:
        left = [DropVar(var.aval) if var in given else var for var in equation.outvars]
        if given.isdisjoint(equation.outvars) or not all(isinstance(var, DropVar) for var in left):
            equations.append(equation.replace(outvars=left))
    inputs = [*jaxpr.invars[:at], *known, *jaxpr.invars[at:]]
    own = ClosedJaxpr(jaxpr.replace(invars=inputs, outvars=list(outputs), eqns=equations), closed.consts)
    return reduce(without_prints(own) if quiet else own)


def without_prints(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program without equations that its outputs do not need, such as a print."""
    needed = {atom for atom in closed.jaxpr.outvars if not isinstance(atom, Literal)}
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not isinstance(atom, Literal))
    return ClosedJaxpr(closed.jaxpr.replace(eqns=kept[::-1]), closed.consts)


def dependence(closed: ClosedJaxpr, choices: bool = True) -> dict[Var, int]:
    """For every variable of the program, the mask of the inputs that can change it.

    Without `choices`, inputs that only say which branch of a `cond` is taken do not count; a `cond` within
    another's branch is not looked into. What a function on the host gives, and all that follows from it, has
    one more bit, `1 << len(inputs)`: it follows from more than the inputs.
    """
    jaxpr = closed.jaxpr
    known: dict[Var, int] = dict.fromkeys(jaxpr.constvars, 0)
    known |= {var: 1 << i for i, var in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        host = runs_once(equation) << len(jaxpr.invars)
        masks = [mask | host for mask in _masks(jaxpr, equation, known, choices)]
        known.update(zip(equation.outvars, masks, strict=True))
    return known


def output_dependence(closed: ClosedJaxpr, choices: bool = True) -> list[int]:
    """The mask of every output of the program; see `dependence`."""
    known = dependence(closed, choices)
    return [0 if isinstance(atom, Literal) else known[atom] for atom in closed.jaxpr.outvars]


def _masks(jaxpr: Any, equation: JaxprEqn, known: Mapping[Var, int], choices: bool) -> list[int]:
    """The masks of an equation's outputs; of a call or loop, each output's own."""
    read = list(dict.fromkeys(atom for atom in equation.invars if not isinstance(atom, Literal)))
    choice = equation.invars[0] if equation.primitive.name == "cond" and not choices else None
    of, outputs = [0 if var is choice else known[var] for var in read], equation.outvars
    if len({*of} - {0}) < 2 or not calls_programs(equation):
        return [functools.reduce(or_, of, 0)] * len(outputs)
    masks = []
    for var in outputs:
        alone = jaxpr.replace(constvars=[], invars=read, outvars=[var], eqns=[equation])
        live = [] if isinstance(var, DropVar) else live_part(ClosedJaxpr(alone, []), [True])[1]
        masks.append(functools.reduce(or_, (of[k] for k in live), 0))
    return masks


BARRIER = "optimization_barrier"

CALLS = {
    **dict.fromkeys(("jit", "pjit", "checkpoint", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
    "eval_jaxpr": "call_jaxpr",  # jax 0.12
}
"""Primitives that only call a program, and the parameter in which it is."""


def inline(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program equal to this one in which no equation calls another program (control flow stays as it is).

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
        parameter = CALLS.get(equation.primitive.name)
        if parameter is None:
            made = [(DropVar if isinstance(v, DropVar) else Var)(v.aval) for v in equation.outvars]
            self.equations.append(equation.replace(invars=read, outvars=made))
            return [*map(self.made_again, made)] if calls_programs(equation) else made
        if equation.params.get("differentiated"):
            chosen = equation.params["prevent_cse"]
            flags = [chosen] * len(read) if isinstance(chosen, bool) else chosen
            held = [i for i, flag in enumerate(flags) if flag and not isinstance(read[i], Literal)]
            barrier = jax.make_jaxpr(jax.lax.optimization_barrier)([spec_of(read[i]) for i in held])
            behind = dict(zip(held, self.call(barrier, [read[i] for i in held]), strict=True))
            read = [behind.get(i, atom) for i, atom in enumerate(read)]
        return self.call(equation.params[parameter], read)

    def made_again(self, var: Var) -> Any:
        """A key made again of its numbers; anything else as it is."""
        if not is_key(var.aval) or isinstance(var, DropVar):
            return var
        again = jax.make_jaxpr(lambda key: as_key(var.aval, plain(key)))(var.aval)
        return self.call(again, [var])[0]


_OPAQUE = frozenset(["pallas_call", "core_map", "run_state", "tpu_custom_call"])
"""Primitives whose programs have references of their own, which nobody outside sees."""

CALLBACKS = frozenset(["pure_callback", "io_callback"])
"""Primitives that ask a function on the host for values."""


def runs_once(equation: JaxprEqn) -> bool:
    """Whether what an equation gives must be saved and never computed again."""
    return any(inner.primitive.name in CALLBACKS or inner.effects for inner in with_inner(equation))


def check_pure(closed: ClosedJaxpr) -> None:
    """Refuse random numbers without a key, and mutable references; prints are no harm."""
    for equation in chain.from_iterable(map(with_inner, closed.jaxpr.eqns)):
        name = equation.primitive.name
        if name == "rng_uniform":
            raise UsageError(
                "draws random numbers by lax.rng_uniform, which gives others when a backward computes it "
                "again; draw them from mb.key: jax.random.uniform(mb.key, shape)"
            )
        if name == "io_callback" and equation.outvars:
            raise UsageError(
                "takes values from io_callback, which may give others when a backward computes it again; "
                "make them part of the data, draw random numbers from mb.key, or take jax.pure_callback for "
                "a function whose results follow from its arguments"
            )
        if any(type(atom.aval).__name__ == "AbstractRef" for atom in (*equation.invars, *equation.outvars)):
            raise UsageError(
                "reads or writes a mutable reference (jax.new_ref), which a backward cannot repeat; compute "
                "with plain arrays, array.at[index].set(value), and pass on in the carry what later layers "
                "need"
            )


def check_repeatable(who: str, closed: ClosedJaxpr, remat: str) -> None:
    """Refuse effects on the host in a layer that is rematerialised; prints by jax.debug are no harm."""
    if any(type(effect).__name__ in ("IOEffect", "OrderedIOEffect") for effect in closed.effects):
        raise UsageError(
            f"{who}: calls io_callback, which JAX does not repeat in a backward, as remat={remat!r} asks; "
            f"take jax.debug.callback, or remat='none'"
        )


def with_inner(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation and those of the programs that it calls."""
    yield equation
    if equation.primitive.name not in _OPAQUE:
        for body in jaxprs_in_params(equation.params):
            for inner in body.eqns:
                yield from with_inner(inner)


Value: TypeAlias = Any
"""Stands for what a variable holds; two that are equal hold the same."""


def inputs_of_outputs(closed: ClosedJaxpr) -> list[int | None]:
    """For each output the index of the input that it is; None if it may differ from every input."""
    values = _values(closed, range(len(closed.jaxpr.invars)))
    return [value if isinstance(value, int) else None for value in values]


def _values(program: Any, inputs: Sequence[Value]) -> list[Value]:
    """What a program gives, closed or not."""
    jaxpr = getattr(program, "jaxpr", program)
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def held(atom: Any) -> Value:
        return object() if isinstance(atom, Literal) else known.get(atom, ("constant", atom))

    for equation in jaxpr.eqns:
        made = _RULES.get(equation.primitive.name, _called)(equation, [*map(held, equation.invars)])
        known.update(zip(equation.outvars, made, strict=True))
    return [*map(held, jaxpr.outvars)]


def _new(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    return [object() for _ in equation.outvars]


def _called(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """What the one program gives that has the equation's inputs and outputs; new values if there is none."""

    def kinds(program: Any) -> Any:
        avals = [[atom.aval for atom in atoms] for atoms in (program.invars, program.outvars)]
        return [[(getattr(a, "shape", a), getattr(a, "dtype", a)) for a in some] for some in avals]

    bodies = list(jaxprs_in_params(equation.params))
    fits = len(bodies) == 1 and kinds(bodies[0]) == kinds(equation)
    return _values(bodies[0], read) if fits else _new(equation, read)


def _copied(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """What the equation gets, unless in another dtype."""
    kept = zip(equation.invars, equation.outvars, read, strict=True)
    return [value if given.aval == out.aval else object() for given, out, value in kept]


def _cond(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    outputs = zip(*(_values(branch, read[1:]) for branch in equation.params["branches"]), strict=True)
    return [first if all(first == value for value in rest) else object() for first, *rest in outputs]


def _while(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    skipped = equation.params["cond_nconsts"]
    constants, carried = equation.params["body_nconsts"], len(equation.outvars)
    return _looped(equation.params["body_jaxpr"], read[skipped:], constants, carried)


def _scan(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    constants, carried = scan_counts(equation)
    end = constants + carried
    rows = [("row", id(equation), value) for value in read[end:]]
    given = _looped(equation.params["jaxpr"], [*read[:end], *rows], constants, carried)
    return [*given[:carried], *(value[2] if value in rows else object() for value in given[carried:])]


def _looped(body: Any, read: Sequence[Value], constants: int, carried: int) -> list[Value]:
    """What a loop's body leaves in what it carries, and what else it gives."""
    values, changing = list(read), set[int]()
    while True:
        given = _values(body, values)
        changed = {i for i in range(carried) if given[i] != values[constants + i]}
        if changed <= changing:
            kept = [object() if i in changing else read[constants + i] for i in range(carried)]
            return [*kept, *given[carried:]]
        for i in changed - changing:
            values[constants + i] = ("changing", object())
        changing |= changed


def _transposed(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    """What is transposed back is itself."""
    value, permutation = read[0], tuple(equation.params["permutation"])
    if isinstance(value, tuple) and value[0] == "transposed":
        _, value, before = value
        permutation = tuple(before[axis] for axis in permutation)
    in_place = permutation == tuple(range(len(permutation)))
    return [value if in_place else ("transposed", value, permutation)]


def _unwrapped(equation: JaxprEqn, read: Sequence[Value]) -> Sequence[Value]:
    return [read[0][1] if isinstance(read[0], tuple) and read[0][0] == "key" else object()]


_RULES: Mapping[str, Callable[[JaxprEqn, Sequence[Value]], Sequence[Value]]] = {
    **dict.fromkeys(("copy", "copy_p", BARRIER, "sharding_constraint", "convert_element_type"), _copied),
    "transpose": _transposed,
    "random_wrap": lambda equation, read: [("key", read[0], equation.params["impl"])],
    "random_unwrap": _unwrapped,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "shard_map": _new,  # its program sees parts
}
"""By primitive, what an equation gives, of what it reads; all others call a program, or compute."""
