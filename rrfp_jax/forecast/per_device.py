"""A traced program as each of a stage's devices runs it: shards for arrays, and what collectives write.

How values lie is Shardy's answer (`propagation.py`). What XLA's partitioner makes of that:

    moved     An operand that lies otherwise than its kernel needs is gathered or exchanged, for each kernel
              anew. Where it is whole, each device takes its part.
    partial   A product over a dimension that is spread gives partial sums as large as the whole result. They
              are added up in place, or written as parts of the sum if the result is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Primitive, Var

from rrfp_jax.forecast.propagation import Layout, whole
from rrfp_jax.forecast.temporaries import PLACED, PRODUCT
from rrfp_jax.runtime.autodiff.traced import spec_of

COLLECTIVE = Primitive("collective")
"""Stands for whatever brings an array onto devices in another way."""

AS_THEY_ARE = frozenset(["gather", "reshape", "iota", "scan", "while", "cond", "custom_call"])
"""Primitives whose operands are not moved. Neither are those of reductions: their results are smaller."""


def per_device(flat: ClosedJaxpr, known: Mapping[Any, Layout]) -> ClosedJaxpr:
    """The program as one device has it, to be looked at only: operations are given what does not fit them.

    Args:
        flat: the program, without calls and barriers.
        known: how its values lie.
    """
    return _Spread(known).program(flat)


class _Spread:
    """Collects a program's equations with variables for shards."""

    def __init__(self, known: Mapping[Any, Layout]) -> None:
        self._layouts = dict(known)
        self._shards: dict[Any, Var] = {}
        self._equations: list[JaxprEqn] = []

    def program(self, flat: ClosedJaxpr) -> ClosedJaxpr:
        """All of it."""
        for equation in flat.jaxpr.eqns:
            if equation.primitive.name in PLACED:  # zeros are made as they are needed
                filled, out = equation.invars[0], equation.outvars[0]
                self._layouts[filled] = self._layout(out)
        for equation in flat.jaxpr.eqns:
            self._add(equation)
        jaxpr = flat.jaxpr.replace(
            invars=[self._shard(var) for var in flat.jaxpr.invars],
            constvars=[self._shard(var) for var in flat.jaxpr.constvars],
            outvars=[a if isinstance(a, Literal) else self._shard(a) for a in flat.jaxpr.outvars],
            eqns=self._equations,
        )
        return ClosedJaxpr(jaxpr, flat.consts)

    def _add(self, equation: JaxprEqn) -> None:
        out = equation.outvars[0]
        layout = self._layouts.get(out, whole(out))
        made = layout
        if equation.primitive.name == PRODUCT:
            one, other = map(self._layout, equation.invars)
            made, wanted = _of_product(equation, one, other, layout)
        else:
            wanted = [_of_other(equation, i, self._layout(a), layout) for i, a in enumerate(equation.invars)]
        read = [self._operand(equation, atom, one) for atom, one in zip(equation.invars, wanted, strict=True)]
        if made == layout and not self._sums_up(equation):
            written = [v if isinstance(v, DropVar) else self._shard(v) for v in equation.outvars]
            self._equations.append(equation.replace(invars=read, outvars=written))
        else:
            partial = _sized(out, made)
            self._equations.append(equation.replace(invars=read, outvars=[partial]))
            self._collect(equation, partial, self._shard(out))

    def _sums_up(self, equation: JaxprEqn) -> bool:
        """Whether a reduction is over what is spread, so that each device has a part of its result."""
        if not equation.primitive.name.startswith("reduce_"):
            return False
        layout = self._layout(equation.invars[0])
        return any(layout[axis] > 1 for axis in equation.params["axes"])

    def _operand(self, equation: JaxprEqn, atom: Any, wanted: Layout) -> Any:
        if isinstance(atom, Literal):
            return atom
        if all(n in (1, w) for n, w in zip(self._layout(atom), wanted, strict=True)):
            return self._shard(atom)
        moved = _sized(atom, wanted)
        self._collect(equation, self._shard(atom), moved)
        return moved

    def _collect(self, like: JaxprEqn, read: Var, written: Var) -> None:
        made = like.replace(primitive=COLLECTIVE, invars=[read], outvars=[written], params={})
        self._equations.append(made)

    def _layout(self, atom: Any) -> Layout:
        return whole(atom) if isinstance(atom, Literal) else self._layouts.get(atom, whole(atom))

    def _shard(self, var: Any) -> Var:
        if var not in self._shards:
            self._shards[var] = _sized(var, self._layout(var))
        return self._shards[var]


def _sized(var: Any, layout: Layout) -> Var:
    """A variable for a part of another's value."""
    shape = tuple(-(-size // n) for size, n in zip(var.aval.shape, layout, strict=True))
    return Var(var.aval.update(shape=shape))


def _of_product(equation: JaxprEqn, one: Layout, other: Layout, out: Layout) -> tuple[Layout, list[Layout]]:
    """How a product is made, before anything is added up, and how its operands must lie."""
    contracted, batch = equation.params["dimension_numbers"]
    pairs = [(one[i], other[j]) for i, j in zip(*contracted, strict=True)]
    shares = [max(pair) if pair[0] == pair[1] or max(out, default=1) == 1 else 1 for pair in pairs]
    made = (1,) * len(out) if any(n > 1 for n in shares) else out
    wanted, at = [], len(batch[0])
    for layout, sums, batched in zip((one, other), contracted, batch, strict=True):
        own = dict(zip(sums, shares, strict=True)) | {i: made[k] for k, i in enumerate(batched)}
        for i in range(len(layout)):
            if i not in own:
                own[i] = made[at]
                at += 1
        wanted.append(tuple(own[i] for i in range(len(layout))))
    return made, wanted


def _of_other(equation: JaxprEqn, place: int, own: Layout, out: Layout) -> Layout:
    """How an operand of anything else must lie."""
    name = equation.primitive.name
    shape, to = (spec_of(atom).shape for atom in (equation.invars[place], equation.outvars[0]))
    if name in AS_THEY_ARE or name.startswith("reduce_"):
        return own
    if name.startswith("scatter"):
        return out if place == 0 else (1,) * len(own) if max(out, default=1) > 1 else own
    if name == "broadcast_in_dim":
        target = equation.params["broadcast_dimensions"]
    elif name == "transpose":
        target = [equation.params["permutation"].index(i) for i in range(len(shape))]
    else:
        target = range(len(shape)) if len(shape) == len(to) else []
    wanted = list(own)
    for i, k in enumerate(target):
        if shape[i] == to[k]:
            wanted[i] = out[k]
    return tuple(wanted)
