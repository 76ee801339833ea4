"""What a program has in memory while it runs, besides arguments and results, as XLA compiles it for GPUs.

Groups of operations that are one kernel (`fusion.py`) are taken in the program's order, and what they write
is kept to its last use. Beyond that, habits of XLA decide, each seen in the programs that it makes. Four are
of what is written, and where:

    converted    A product that only a conversion reads is written converted, where that is smaller or a
                 result of the program. A product, or what takes rows of a table, converts itself what it
                 reads of the program's arguments, if nothing else reads that.
    together     Groups of one size that read the same array of that size become one kernel, so what they
                 write is there at once: a softmax's weights, made anew for the gradient of the values, and
                 the gradient of its scores.
    in place     What is elementwise, and a scatter, takes the place of what it reads last, if that is as
                 large.
    not in place What also reads a reduction of an array that it reads: both are one kernel, which still reads
                 when it begins to write (the gradient of a softmax's scores).

Three are of layers that are one program (`layer_costs.joined`):

    spare places The place of a result that a later layer writes is free till then, for one array at a time.
    waiting      What takes more memory at once than any kernel of the layers that come next waits for these:
                 a head's gradient, and the zeros that an embedding's is scattered to; these come first else.
                 Until then what a gradient is made of is kept.
    put off      Where several devices share a stage, gradients are put off further, to have something to do
                 while values go from device to device: what they are made of is kept through all layers.

Not foreseen: that what is elementwise goes straight into the place of a result (on several devices it is);
and what libraries want for themselves, or partial products of small matrices, which is a few MiB more. For
figures see docs/gpu-programs.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from rrfp_jax.forecast.fusion import FUSED, SCAN, Group, fused_groups, read, without_last
from rrfp_jax.runtime.autodiff.traced import inline, without_barriers
from rrfp_jax.runtime.sizes import nbytes

PLACED = frozenset(["scatter-add", "scatter", "dynamic_update_slice"])
"""Primitives that change some places of an array."""

PRODUCT, GATHER, CONVERSION = "dot_general", "gather", "convert_element_type"

MOVES = frozenset(["transpose", "reshape", "squeeze", "expand_dims", CONVERSION])
"""Primitives that give the same numbers in another form."""


@dataclass(frozen=True, kw_only=True)
class Temporaries:
    """Intermediate results of a program while it runs.

    Attributes:
        moments: by kernel, the bytes of each result that is there with it.
        first_bytes: what is there all the time; see `first_bytes`.
        steepest: most bytes by which a kernel writes more than it is the last to read.
        late: gradients that take more than is free after them: by how many bytes, and what they keep till
            then.
        waiting_bytes: of what gradients are computed from, and of the largest; where several devices do that,
            XLA puts it off, to have something to do while values go from device to device.
    """

    moments: Sequence[Sequence[int]] = ()
    first_bytes: int = 0
    steepest: int = 0
    late: Sequence[tuple[int, int]] = ()
    waiting_bytes: int = 0

    def most(self, spare: int = 0) -> int:
        """Bytes at once, if there is a place of `spare` bytes for one of them at a time."""
        return max(
            (sum(own) - max((n for n in own if n <= spare), default=0) for own in self.moments), default=0
        )


def temporary_bytes(closed: ClosedJaxpr, added: int = 0) -> int:
    """The most bytes of intermediate results that are in memory at once.

    Args:
        closed: the program.
        added: how many of its last results are gradients, each of which is added to a sum at once.
    """
    return temporaries_of(closed, added).most()


def temporaries_of(closed: ClosedJaxpr, added: int = 0, several: bool = False) -> Temporaries:
    """All intermediate results of a program; see `temporary_bytes`.

    With `several` it is what one of a stage's devices runs (`per_device.py`).
    """
    flat = _converted(without_last(without_barriers(inline(closed)).jaxpr, added))
    lasting = {*flat.invars, *flat.constvars, *read(flat.outvars)}
    groups = list(fused_groups(flat))
    made = {var: place for place, group in enumerate(groups) for var in group.equation.outvars}
    ends = _last_uses(groups, made)
    freed = _freed_early(groups, made, ends, lasting)
    counted = made.keys() - lasting
    if several:
        counted -= {atom for atom, taker in freed.items() if taker in lasting}
    rises, late, waiting, largest = [0], [], set[Any](), 0
    for place, group in enumerate(groups):
        out = group.equation.outvars
        kept = nbytes([atom.aval for atom in group.sources & made.keys() - lasting if ends[atom] == place])
        rises.append(nbytes([var.aval for var in out]) - kept)
        if group.name == PRODUCT and out[0] not in lasting and out[0] not in ends:  # it is added at once
            late.append((rises[-1], kept))
            waiting |= group.sources & counted
            largest = max(largest, nbytes(out[0].aval))
    return Temporaries(
        moments=_moments(groups, {var: made[var] for var in made if var in counted}, ends, freed),
        first_bytes=first_bytes(closed, added),
        steepest=max(rises),
        late=[] if several else late,
        waiting_bytes=nbytes([atom.aval for atom in waiting]) + largest if several else 0,
    )


def _moments(
    groups: Sequence[Group], made: Mapping[Any, int], ends: Mapping[Any, int], freed: Collection[Any]
) -> list[list[int]]:
    """By group, the bytes of each of these values that is there with it, and of what a loop has inside."""
    moments: list[list[int]] = [[] for _ in groups]
    for var, born in made.items():
        for place in range(born, ends.get(var, born) + (var not in freed)):
            moments[place].append(nbytes(var.aval))
    for place, group in enumerate(groups):
        if group.name == SCAN:
            moments[place].append(temporary_bytes(group.equation.params["jaxpr"]))
    return moments


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
    """The program without conversions that products and gathers do, of what they read or write."""
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
            if var not in results and [own.primitive.name for own in readers[var]] in ([PRODUCT], [GATHER]):
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
) -> dict[Any, Any]:
    """Values whose place is taken over by what the group writes that reads them last."""
    freed: dict[Any, Any] = {}
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
            for atom in alike & made.keys() - lasting - freed.keys():
                if ends[atom] == place and nbytes(atom.aval) == nbytes(var.aval) and not reduced:
                    freed[atom] = var
                    break
    return freed


def _size(var: Any) -> int:
    """Number of elements."""
    return int(getattr(var.aval, "size", 0))
