"""Data made of microbatches that something else makes one after the other, such as a grain DataLoader."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.data.contract import Arrays, InMemory, Microbatch
from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown


class Stream:
    """The elements of an iterable, `microbatches` a step: a `Data` for a grain DataLoader or IterDataset.

    Each element is a microbatch, a dict of arrays. Every process iterates over all of them, since only the
    elements tell the shapes of a step; a hash of their contents is part of the plan, so processes that see
    different ones are told. Going back, or on past steps that were not asked for (a restored run), costs as
    much as making the elements between, from the beginning if need be. For documents with a length and an
    index, such as a MapDataset, use `Examples`, which reads only what a step needs.

    Args:
        elements: gives the same elements whenever it is iterated over anew.
        microbatches: per step.
        buckets: fields of every shape that microbatches can have, so that others are refused; () for any.

    Raises:
        UsageError: when made: an iterator, which cannot begin anew, or an impossible number; when planned:
            the elements end before the step, or are no dicts of arrays.
    """

    def __init__(
        self,
        elements: Iterable[Any],
        microbatches: int,
        buckets: Sequence[Mapping[str, jax.ShapeDtypeStruct]] = (),
    ) -> None:
        if isinstance(elements, Iterator) or not isinstance(elements, Iterable):
            raise UsageError(
                f"elements of type {type(elements).__name__}: give something that can be iterated over again "
                "and again, such as a grain DataLoader or IterDataset, not an iterator"
            )
        if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
            raise UsageError(f"microbatches={shown(microbatches)}: a step needs a whole number, at least one")
        self.buckets = buckets
        self._elements, self._microbatches = elements, microbatches
        self._iterator: Iterator[Any] = iter(elements)
        self._next, self._step, self._plan = 0, -1, list[Microbatch]()
        self._arrays: dict[Any, Arrays] = {}

    def plan(self, step: int) -> Sequence[Microbatch]:
        """The microbatches of `step`, with their contents' hash as source."""
        if step != self._step:
            if step < self._next:
                self._iterator, self._next = iter(self._elements), 0
            skipped = (step - self._next) * self._microbatches
            taken = list(itertools.islice(self._iterator, skipped, skipped + self._microbatches))
            self._next, self._step = step + 1, -1
            if len(taken) < self._microbatches:
                self._iterator, self._next = iter(self._elements), 0
                raise UsageError(
                    f"step {step}: the stream ends before it, with {len(taken)} of {self._microbatches} "
                    "microbatches; repeat it, or ask for fewer steps"
                )
            made = InMemory(taken)
            self._plan, self._arrays = [], {}
            for j, mb in enumerate(made.plan(step)):
                arrays = made.load(mb, mb.fields)
                source = (step, j, _digest(arrays))
                self._plan.append(Microbatch(mb.fields, source))
                self._arrays[source] = arrays
            self._step = step
        return self._plan

    def load(self, microbatch: Microbatch, fields: Collection[str]) -> Arrays:
        """The arrays of `fields`; `UsageError` if the stream gives others than when planned."""
        self.plan(microbatch.source[0])
        if microbatch.source not in self._arrays:
            raise UsageError(
                f"step {microbatch.source[0]}: the stream gives other microbatches than before; it must give "
                "the same ones whenever it is iterated over anew: seed it"
            )
        arrays = self._arrays[microbatch.source]
        return {name: arrays[name] for name in fields}


def _digest(arrays: Arrays) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
