"""What a program has in memory while it runs, besides arguments and results, as XLA compiles it for GPUs.

Groups of operations that are one kernel (`fusion.py`) are taken in the program's order, and what they write
is kept to its last use. Beyond that, four habits of XLA decide, each seen in the programs that it makes:

    converted    A product that only a conversion reads is written converted, where that is smaller or a
                 result of the program. A product converts itself what it reads of the program's arguments, if
                 nothing else reads that.
    together     Groups of one size that read the same array of that size become one kernel, so what they
                 write is there at once: a softmax's weights, made anew for the gradient of the values, and
                 the gradient of its scores.
    in place     What is elementwise, and a scatter, takes the place of what it reads last, if that is as
                 large.
    not in place What also reads a reduction of an array that it reads: both are one kernel, which still reads
                 when it begins to write (the gradient of a softmax's scores).

Not foreseen: that places of results are used before these are written, so that it takes less; and what
libraries want for themselves, or partial products of small matrices, which is a few MiB more. For figures see
docs/gpu-programs.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from rrfp_jax.forecast.fusion import FUSED, SCAN, Group, fused_groups, read, without_last
from rrfp_jax.runtime.autodiff.inline import inline, without_barriers
from rrfp_jax.runtime.sizes import nbytes

PLACED = frozenset(["scatter-add", "scatter", "dynamic_update_slice"])
"""Primitives that change some places of an array."""

PRODUCT, CONVERSION = "dot_general", "convert_element_type"

MOVES = frozenset(["transpose", "reshape", "squeeze", "expand_dims", CONVERSION])
"""Primitives that give the same numbers in another form."""


def temporary_bytes(closed: ClosedJaxpr, added: int = 0) -> int:
    """The most bytes of intermediate results that are in memory at once.

    Args:
        closed: the program.
        added: how many of its last results are gradients, each of which is added to a sum at once.
    """
    flat = _converted(without_last(without_barriers(inline(closed)).jaxpr, added))
    lasting = {*flat.invars, *flat.constvars, *read(flat.outvars)}
    groups = list(fused_groups(flat))
    made = {var: place for place, group in enumerate(groups) for var in group.equation.outvars}
    ends = _last_uses(groups, made)
    freed = _freed_early(groups, made, ends, lasting)
    changes: Counter[int] = Counter()  # of bytes, by place
    for var, born in made.items():
        if var not in lasting:
            changes[born] += nbytes(var.aval)
            changes[ends.get(var, born) + (var not in freed)] -= nbytes(var.aval)
    held = most = 0
    for place, group in enumerate(groups):
        inside = temporary_bytes(group.equation.params["jaxpr"]) if group.name == SCAN else 0
        held += changes[place]
        most = max(most, held + inside)
    return most


def first_bytes(closed: ClosedJaxpr, added: int = 0) -> int:
    """Of that, what is there all the time: XLA writes the zeros first that gradients are scattered to."""
    flat, found = without_barriers(inline(closed)).jaxpr, 0
    makers = {var: equation for equation in flat.eqns for var in equation.outvars}
    for gradient in flat.outvars[len(flat.outvars) - added :]:
        maker = makers.get(gradient)
        while maker is not None and maker.primitive.name in MOVES:
            maker = makers.get(maker.invars[0])
        if maker is not None and maker.primitive.name in PLACED:
            found += nbytes(maker.outvars[0].aval)
    return found


def _converted(flat: Jaxpr) -> Jaxpr:
    """The program without conversions that products do, of what they read or write."""
    readers = defaultdict[Any, list[JaxprEqn]](list)
    for equation in flat.eqns:
        for atom in read(equation.invars):
            readers[atom].append(equation)
    arguments, results = {*flat.invars, *flat.constvars}, read(flat.outvars)
    names: dict[Any, Any] = {}  # of what is not written, what is there instead
    written: dict[Any, Any] = {}  # by product, its result
    for equation in flat.eqns:
        if equation.primitive.name == PRODUCT:
            chain = _chain(equation.outvars[0], readers, results)
            written[chain[0]] = chain[-1]
            names.update(dict.fromkeys(chain[1:], chain[-1]))
        elif equation.primitive.name == CONVERSION and not arguments.isdisjoint(read(equation.invars)):
            (var,) = equation.outvars
            if var not in results and [own.primitive.name for own in readers[var]] == [PRODUCT]:
                names[var] = equation.invars[0]
    kept = (equation for equation in flat.eqns if names.keys().isdisjoint(equation.outvars))
    return _renamed(flat, kept, names, written)


def _chain(product: Any, readers: Mapping[Any, Sequence[JaxprEqn]], results: Set[Any]) -> list[Any]:
    """A product's result, and in what forms it may be written instead; the last one is best."""
    chain = [product]
    while chain[-1] not in results and [own.primitive.name in MOVES for own in readers[chain[-1]]] == [True]:
        chain += readers[chain[-1]][0].outvars
    while len(chain) > 1 and chain[-1] not in results and nbytes(chain[-1].aval) >= nbytes(product.aval):
        chain.pop()
    return chain


def _renamed(
    flat: Jaxpr, kept: Iterable[JaxprEqn], names: Mapping[Any, Any], written: Mapping[Any, Any]
) -> Jaxpr:
    """The program of equations that read other values, and write others."""
    equations = [
        own.replace(
            invars=[atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in own.invars],
            outvars=[written.get(var, var) for var in own.outvars],
        )
        for own in kept
    ]
    found: Jaxpr = flat.replace(eqns=equations)
    return found


def _last_uses(groups: Sequence[Group], made: Mapping[Any, int]) -> dict[Any, int]:
    """By value, the place of the last group that reads it, or that is made together with it."""
    ends = {atom: place for place, group in enumerate(groups) for atom in group.sources}
    before: list[int] = []  # by group, those that it needs, as bits
    alike = defaultdict[int, list[int]](list)  # by size, elementwise groups
    for place, group in enumerate(groups):
        needed = 0
        for own in {made[atom] for atom in group.sources if atom in made}:
            needed |= before[own] | 1 << own
        before.append(needed)
        if group.name not in FUSED:
            continue
        size = _size(group.equation.outvars[0])
        for earlier in alike[size]:
            shared = group.sources & groups[earlier].sources
            var = groups[earlier].equation.outvars[0]
            if var in ends and not needed >> earlier & 1 and any(_size(atom) == size for atom in shared):
                ends[var] = max(ends[var], place)
        alike[size].append(place)
    return ends


def _freed_early(
    groups: Sequence[Group], made: Mapping[Any, int], ends: Mapping[Any, int], lasting: Set[Any]
) -> Set[Any]:
    """Values whose place is taken over by the group that reads them last."""
    freed: set[Any] = set()
    for place, group in enumerate(groups):
        if group.name not in FUSED | PLACED:
            continue
        for var in group.equation.outvars:
            size = _size(var)
            alike = {atom for atom in group.sources if _size(atom) == size}
            reduced = any(
                groups[made[atom]].reduces and groups[made[atom]].sources & alike
                for atom in group.sources
                if atom in made
            )
            for atom in alike & made.keys() - lasting - freed:
                if ends[atom] == place and nbytes(atom.aval) == nbytes(var.aval) and not reduced:
                    freed.add(atom)
                    break
    return freed


def _size(var: Any) -> int:
    """Number of elements."""
    return int(getattr(var.aval, "size", 0))
