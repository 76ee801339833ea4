"""The data contract: `plan(step)` says what a step consists of, `load` fetches only what is read.

`plan` runs on every process and must be cheap and deterministic: it gives the microbatches of a step by
shape and weight. `load` runs only where a stage reads a field (the tokens on the first stage, labels and
masks on the last). A plain function that returns the microbatches themselves is wrapped. Both may be called
on another thread than the main one, while the step before runs, but never by two threads at once.

Data may also say, as `buckets`, the fields of every shape that its microbatches can have; a plan with another
one is refused then.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import jax
import numpy as np

from rrfp_jax.core.step_rules import Bucket, dtype_name
from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import shown, without_addresses
from rrfp_jax.user_code import called

Arrays: TypeAlias = Mapping[str, np.ndarray[Any, np.dtype[Any]]]

Fields: TypeAlias = Mapping[str, jax.ShapeDtypeStruct]
"""Of a microbatch, by name."""

MOST_MICROBATCHES = 2**14
"""Of a step, where they are arrays at hand: tens are usual."""

MOST_TOKENS = 2**30
"""Of a step; the largest batches that anybody trains with have a tenth of them."""

_FIELDS = "{'tokens': jax.ShapeDtypeStruct(shape, dtype)}"


@dataclass(frozen=True)
class Microbatch:
    """One planned microbatch: shape and dtype of each field, and what `load` needs to find the data.

    `source` may be anything whose `repr` is the same on every process (offsets, file names, indices);
    it is part of the plan's hash. `weight` is the microbatch's loss weight where it is known beforehand
    (tokens, say), else None.
    """

    fields: Fields
    source: Any = None
    weight: float | None = None


@runtime_checkable
class Data(Protocol):
    """What a Trainer reads: a deterministic plan of each step, and the arrays of a planned microbatch."""

    def plan(self, step: int) -> Sequence[Microbatch]:
        """The microbatches of `step`, equal on every process."""

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`, each with the planned shape and dtype."""


class InMemory:
    """Microbatches that are already there: a list for every step, or a function of the step.

    Raises:
        UsageError: no list of them; when planned: no microbatches, or one that is no dict of arrays.
    """

    def __init__(self, microbatches: Sequence[Arrays] | Callable[[int], Iterable[Arrays]]) -> None:
        self._source = microbatches if callable(microbatches) else None
        self._step: int | None = None
        self._current: list[Arrays] = []
        if not callable(microbatches):
            once = not isinstance(microbatches, Sequence)  # a generator may fill its buffers again
            self._current = _arrays_of_all("microbatches is", microbatches, copied=once)

    def plan(self, step: int) -> Sequence[Microbatch]:
        """See `Data.plan`; the source is the position in the step."""
        if self._source is not None and step != self._step:
            # Each is copied before the next is asked for, which may be in the same buffers.
            made = self._source(step)
            self._current, self._step = _arrays_of_all(f"data({step}) returned", made, copied=True), step
        return [Microbatch(_specs(arrays), source=(step, j)) for j, arrays in enumerate(self._current)]

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """See `Data.load`."""
        step, position = microbatch.source
        if self._source is not None and step != self._step:
            self.plan(step)
        return {name: self._current[position][name] for name in fields}


class Stream:
    """An iterable as data, `microbatches` elements per step, such as a grain DataLoader or IterDataset.

    Each element is a microbatch, a dict of arrays. Every process iterates over all of them, since only the
    elements determine the shapes of a step; a hash of their contents is part of the plan, so processes that
    see different ones raise an error. Going back, or skipping steps (a resumed run), iterates over all
    elements in between, from the beginning if need be. For documents with a length and an index, such as a
    MapDataset, use `Examples`, which reads only what a step needs.

    Args:
        elements: an iterable, not an iterator; it yields the same elements each time. An evaluation takes
            as many steps as its `len` has; of one without, one step unless told.
        microbatches: per step.
        buckets: fields of every shape that microbatches can have, so that others are rejected; () for any.

    Raises:
        UsageError: when made: an iterator, which cannot restart, or an impossible number; when planned: the
            elements end before the step, or are no dicts of arrays.
    """

    def __init__(self, elements: Iterable[Any], microbatches: int, buckets: Sequence[Fields] = ()) -> None:
        if isinstance(elements, Iterator) or not isinstance(elements, Iterable):
            raise UsageError(
                f"elements of type {type(elements).__name__}: give something that can be iterated over again "
                "and again, such as a grain DataLoader or IterDataset, not an iterator"
            )
        if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
            raise UsageError(f"microbatches={shown(microbatches)}: a step needs a whole number, at least one")
        self.buckets = buckets
        self._elements, self._microbatches = elements, microbatches
        length = operator.length_hint(elements)  # 0 if unknown; grain has one that stands for no end
        self.steps = max(1, length // microbatches) if length < 2**40 else 1
        self._iterator: Iterator[Any] = iter(elements)
        self._next: float = 0  # step that it gives next
        self._end: tuple[float, int] = math.inf, 0  # step that lacks microbatches, and how many it has
        self._step, self._plan = -1, list[Microbatch]()
        self._arrays: dict[Any, Arrays] = {}  # by source

    def plan(self, step: int) -> Sequence[Microbatch]:
        """The microbatches of `step`, with their contents' hash as source."""
        if step != self._step:
            self._refuse_its_end(step)  # at once: to find it again is to iterate over everything
            if step < self._next:
                self._iterator, self._next = iter(self._elements), 0
            skipped = (step - int(self._next)) * self._microbatches
            elements = itertools.islice(self._iterator, skipped, skipped + self._microbatches)
            self._next, self._step = math.inf, -1  # what fails may have lost elements: begin anew then
            # Each is copied before the next is asked for, which may be in the same buffers.
            taken = [_arrays(f"microbatch {j}", own, copied=True) for j, own in enumerate(elements)]
            if len(taken) < self._microbatches:
                self._end = step, len(taken)
                self._refuse_its_end(step)
            self._arrays = {(step, j, _digest(arrays)): arrays for j, arrays in enumerate(taken)}
            self._plan = [Microbatch(_specs(own), source) for source, own in self._arrays.items()]
            self._next, self._step = step + 1, step
        return self._plan

    def _refuse_its_end(self, step: int) -> None:
        """UsageError for the step at which the stream was found to end, and for those after it."""
        end, count = self._end
        if step >= end:
            raise UsageError(
                f"step {step}: the stream ends before it, with {count if step == end else 0} of "
                f"{self._microbatches} microbatches; repeat it, or ask for fewer steps"
            )

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; `UsageError` if the stream gives others than when planned."""
        self.plan(microbatch.source[0])
        if microbatch.source not in self._arrays:
            raise UsageError(
                f"step {microbatch.source[0]}: the stream gives other microbatches than before; it must give "
                "the same ones whenever it is iterated over anew: seed it"
            )
        return {name: self._arrays[microbatch.source][name] for name in fields}


def as_data(data: Any) -> Data:
    """A `Data` as it is; a function of the step, or a list of microbatches, wrapped; else `UsageError`."""
    if isinstance(data, type):  # which has the methods, too
        name = data.__name__
        raise UsageError(f"data: {name} is a class; give an object of it, {name}(...)")
    if isinstance(data, Data):
        return data
    if callable(data) or isinstance(data, Sequence):
        if callable(data) and not takes_one(data):
            if inspect.isgeneratorfunction(data):
                raise UsageError(
                    f"data={data.__name__}: a generator function of no step; give data(step), which returns "
                    f"the microbatches of one step, or rrfp.data.Stream(elements, microbatches)"
                )
            raise UsageError("data: the function must take the step and nothing else; write it as data(step)")
        return InMemory(data)
    if isinstance(data, Iterator):
        raise UsageError(
            f"data={type(data).__name__}: an iterator cannot begin anew, as a resumed run must; give a "
            "function of the step, or rrfp.data.Stream(elements, microbatches) of what can be iterated over "
            "again"
        )
    iterates = isinstance(data, Iterable) and not isinstance(data, Mapping)
    or_stream = "; of what it iterates over: rrfp.data.Stream(elements, microbatches)" if iterates else ""
    raise UsageError(
        f"data={type(data).__name__}(...): give an object with plan(step) and load(microbatch, fields), "
        f"a function of the step that returns microbatches, or a list of microbatches (dicts of arrays)"
        f"{or_stream}"
    )


def takes_one(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with one argument, as far as Python knows."""
    try:
        inspect.signature(function).bind(0)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        return isinstance(error, ValueError)
    return True


def plan_step(data: Data, step: int) -> Sequence[Microbatch]:
    """The step's plan, checked.

    Raises:
        UsageError: no microbatches, something else than `Microbatch`, one without rows, or one that fits no
            bucket of data that says which it has; names the nearest.
        TrainingError: the data raised something, or tried to end the process.
    """
    with called(f"step {step}: the data's plan({step})", TrainingError):
        plan = list(data.plan(step))
    if not plan:
        raise UsageError(
            f"step {step}: the data plans 0 microbatches; a step needs at least one. Where data ends, train "
            f"that many steps, or begin anew in data({step})"
        )
    for j, mb in enumerate(plan):
        _check_rows(f"step {step}: microbatch {j}", mb)
    if declared := declared_buckets(data):
        check_buckets(step, plan, declared)
    else:
        buckets = buckets_of(plan)
        check_dtypes(step, buckets, buckets[:1], "microbatch 0")
    return plan


def check_dtypes(step: int, buckets: Sequence[Bucket], known: Sequence[Bucket], where: str) -> None:
    """Refuse a field of another dtype than in known buckets, for which programs would be compiled anew.

    `where` says what these are of; the first one of them that has a field counts.
    """
    dtypes = {name: dtype for bucket in reversed(known) for name, _, dtype in bucket}
    for j, bucket in enumerate(buckets):
        for name, shape, dtype in bucket:
            expected = dtypes.get(name, dtype)
            if dtype != expected:
                raise UsageError(
                    f"step {step}: microbatch {j}: its field {name!r} is {dtype}{list(shape)}, but "
                    f"{expected} in {where}; give a field one dtype everywhere: array.astype({expected!r})"
                )


def _check_rows(where: str, mb: Any) -> None:
    """Refuse what is no microbatch, fields without a dtype, and no row; some arrays may be empty."""
    if not isinstance(mb, Microbatch):
        raise UsageError(f"{where} of the plan is of type {type(mb).__name__}, not rrfp.Microbatch")
    if not isinstance(mb.fields, Mapping):
        raise UsageError(f"{where}: its fields are {shown(mb.fields)}: give a dict of them, {_FIELDS}")
    if odd := [name for name, spec in mb.fields.items() if not hasattr(spec, "dtype")]:
        given = shown(mb.fields[odd[0]])
        raise UsageError(f"{where}: its field {odd[0]!r} is {given}: give jax.ShapeDtypeStruct(shape, dtype)")
    arrays = [(name, spec) for name, spec in mb.fields.items() if tuple(spec.shape)]
    if arrays and not any(math.prod(spec.shape) for _, spec in arrays):
        name, spec = arrays[0]
        form = f"{np.dtype(spec.dtype).name}{list(spec.shape)}"
        raise UsageError(f"{where} has no rows: its field {name!r} is {form}; leave the microbatch out")


def declared_buckets(data: Data) -> list[Bucket]:
    """The buckets of data that says which it has; otherwise none. `UsageError` for what are none."""
    buckets = getattr(data, "buckets", None)
    try:
        return [bucket_of(fields) for fields in buckets or ()]
    except (AttributeError, TypeError, ValueError):
        raise UsageError(
            f"the data's buckets={shown(buckets)}: give of each a dict of its fields, {_FIELDS}, or call the "
            "attribute otherwise"
        ) from None


def steps_of(data: Data) -> int:
    """The steps of an evaluation; 1 of data that does not say. `UsageError` if it says what is no count."""
    steps = 1 if (said := getattr(data, "steps", None)) is None else said
    if not isinstance(steps, Integral) or isinstance(steps, bool) or steps < 1:
        raise UsageError(
            f"the data's steps is {shown(said)}: an evaluation takes a whole number of them, at least 1; "
            f"leave the attribute out, or give more data"
        )
    return int(steps)


def check_buckets(step: int, plan: Sequence[Microbatch], known: Sequence[Bucket]) -> None:
    """Refuse a plan with a microbatch whose shapes are no known bucket; `UsageError` names the nearest."""
    for j, bucket in enumerate(buckets_of(plan)):
        if bucket in known:
            continue
        alike = [other for other in known if [f[0] for f in other] == [f[0] for f in bucket]] or list(known)
        nearest = min(alike, key=lambda other: abs(_size(other) - _size(bucket)))
        raise UsageError(
            f"step {step}: microbatch {j} with {words_of_bucket(bucket)} fits none of the data's "
            f"{len(known)} buckets; the nearest has {words_of_bucket(nearest)}: pad to that, or add a bucket"
        )


def plan_hash(plan: Sequence[Microbatch]) -> str:
    """16 hex digits that are equal on two processes exactly if they plan the same step."""
    text = repr([(sorted(mb.fields.items()), mb.source, mb.weight) for mb in plan])
    return hashlib.sha256(without_addresses(text).encode()).hexdigest()[:16]


def buckets_of(plan: Sequence[Microbatch]) -> list[Bucket]:
    """The shape bucket of every microbatch of a plan."""
    return [bucket_of(mb.fields) for mb in plan]


def bucket_of(fields: Fields) -> Bucket:
    """The bucket that these fields are, with the dtypes that JAX computes with."""
    return tuple(
        (name, tuple(spec.shape), dtype_name(jax.dtypes.canonicalize_dtype(spec.dtype)))
        for name, spec in sorted(fields.items())
    )


def load_checked(data: Data, step: int, j: int, planned: Microbatch, fields: Collection[str]) -> Arrays:
    """Load fields of a microbatch and hold them against its plan.

    Returns:
        Arrays that nobody else can write to: data may fill the same buffers again, while these are still on
        their way to a device, which on CPU may not even copy them.

    Raises:
        UsageError: a field is missing, or has another shape or dtype than planned, or numbers beyond JAX's.
        TrainingError: the data raised something, or tried to end the process.
    """
    with called(f"step {step}: the data's load() of microbatch {j}", TrainingError):
        arrays = data.load(planned, fields)
    where = f"step {step}, microbatch {j}"
    if not isinstance(arrays, Mapping):
        raise UsageError(f"{where}: load() gave {type(arrays).__name__}, not arrays by the names of fields")
    loaded: dict[str, Any] = {}
    for name in fields:
        if name not in arrays:
            found = ", ".join(sorted(map(str, arrays))) or "nothing"
            raise UsageError(f"{where}: field {name!r} was planned but not loaded; load() gave {found}")
        given, spec = arrays[name], planned.fields[name]
        got = np.asarray(given)
        if got.shape != tuple(spec.shape) or not _alike(got.dtype, np.dtype(spec.dtype)):
            raise UsageError(
                f"{where}: field {name!r} is {got.dtype}{list(got.shape)}, "
                f"planned as {spec.dtype}{list(spec.shape)}"
            )
        got = _canonical(f"{where}: field {name!r}", got)
        loaded[name] = given if isinstance(given, jax.Array) else _kept(got)  # JAX's cannot be written to
    return loaded


def _alike(dtype: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether they are equal but for the order of bytes."""
    return dtype == other or dtype.name == other.name


def load_step(data: Data, step: int) -> list[dict[str, Any]]:
    """All arrays of a step, by microbatch and name. Raises as `load_checked` does."""
    plan = plan_step(data, step)
    return [dict(load_checked(data, step, j, mb, frozenset(mb.fields))) for j, mb in enumerate(plan)]


def load_repeatedly(data: Data, step: int, j: int, planned: Microbatch) -> Arrays:
    """Load all fields of a microbatch at once, then each by itself as stages do, and compare.

    Stages load different fields of the same microbatch, and a restored run loads it again. If `load` draws
    anew each time, labels do not belong to the tokens, and nothing else would tell.

    Raises:
        UsageError: `load` gave different values; and what `load_checked` raises.
    """
    arrays = load_checked(data, step, j, planned, frozenset(planned.fields))
    for name in sorted(planned.fields):
        again = load_checked(data, step, j, planned, frozenset([name]))
        if np.asarray(arrays[name]).tobytes() != np.asarray(again[name]).tobytes():
            raise UsageError(
                f"step {step}, microbatch {j}: load() gave different values for field {name!r} when called "
                "again; draw from a generator that is seeded by the microbatch's source, not from one for all"
            )
    return arrays


def words_of_bucket(bucket: Bucket) -> str:
    """The fields of a bucket as messages name them: "labels int32[2, 8], tokens int32[2, 8]"."""
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, shape, dtype in bucket)


def _size(bucket: Bucket) -> int:
    return sum(math.prod(shape) for _, shape, _ in bucket)


def _arrays_of_all(what: str, given: Any, copied: bool = False) -> list[Arrays]:
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        got = "one dict" if isinstance(given, Mapping) else shown(given)
        raise UsageError(f"{what} {got}: give a list of microbatches, such as [{{'tokens': array}}]")
    found = []
    for j, mb in enumerate(given):
        if j == MOST_MICROBATCHES:
            raise UsageError(
                f"more than {MOST_MICROBATCHES:,} microbatches for one step: does what gives them never end? "
                f"data(step) returns those of one step"
            )
        found.append(_arrays(f"microbatch {j}", mb, copied))
    return found


def _specs(arrays: Arrays) -> Fields:
    return {name: jax.ShapeDtypeStruct(own.shape, own.dtype) for name, own in arrays.items()}


def _arrays(who: str, mb: Any, copied: bool) -> Arrays:
    if not isinstance(mb, Mapping) or not mb:
        raise UsageError(f"{who} must be a dict of arrays with at least one field, got {type(mb).__name__}")
    if odd := [name for name in mb if not isinstance(name, str)]:
        raise UsageError(f"{who}: the name of a field is text, such as 'tokens', not {shown(odd[0])}")
    arrays = {name: _array(who, name, value) for name, value in mb.items()}
    return {name: _kept(array) for name, array in arrays.items()} if copied else arrays


def _kept(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The array, if it is one of these already; otherwise a copy, which can only be read."""
    if array.flags.writeable or not array.flags.owndata:
        array = np.array(array)
        array.flags.writeable = False
    return array


def _array(who: str, name: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """A field as an array that JAX takes."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        cause = "is ragged: pad it to one shape" if isinstance(error, ValueError) else "is no array"
        raise UsageError(f"field {name!r} of {who} {cause} ({error})") from None
    return _canonical(f"field {name!r} of {who}", array)


def _canonical(what: str, array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """The array in the machine's order of bytes, 64-bit numbers as the 32-bit ones that JAX computes with."""
    dtype, scalar = array.dtype, cast(Any, array.dtype.type)
    if not _is_number(scalar):
        raise UsageError(f"{what} has dtype {dtype}: give arrays of numbers that JAX has, such as float32")
    found = array.astype(jax.dtypes.canonicalize_dtype(dtype.newbyteorder("=")), copy=False)
    if found is not array and found.dtype.kind in "iu" and (changed := array[found != array]).size:
        raise UsageError(
            f"{what} has {changed[0]}, beyond the {found.dtype} that JAX computes with: "
            f"give smaller numbers, or set jax_enable_x64"
        )
    return found


@lru_cache(maxsize=128)
def _is_number(scalar: type) -> bool:
    """Whether JAX has such scalars: numbers, or truth values."""
    known = issubclass(scalar, np.bool_) or jax.numpy.issubdtype(scalar, np.number)
    return known and scalar not in (np.longdouble, np.clongdouble, np.timedelta64)


def _digest(arrays: Arrays) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
