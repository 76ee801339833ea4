"""When a process of a group comes to know what it will run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from rrfp_jax.core.group import Decision
from rrfp_jax.runtime.run.consensus import KINDS, Carrier, Plain
from rrfp_jax.trace.records import TaskRecord


class Watched:
    """A carrier that notes when (s) this process has heard of each place in the order from its leader."""

    def __init__(self, inner: Carrier) -> None:
        self._inner = inner
        self._heard: dict[int, float] = {}

    @property
    def calls(self) -> int:
        """See `Carrier.calls`."""
        return self._inner.calls

    def post(self, message: Plain) -> None:
        """See `Carrier.post`."""
        self._inner.post(message)

    def poll(self) -> list[Plain]:
        """See `Carrier.poll`."""
        come = self._inner.poll()
        for _, _, kind, message in come:
            if KINDS[kind] is Decision:
                self._heard[message[0]] = perf_counter()
        return come

    def heard(self) -> Mapping[int, int]:
        """See `Carrier.heard`."""
        return self._inner.heard()

    def forget(self, batches: int) -> None:
        """See `Carrier.forget`."""
        self._inner.forget(batches)

    def close(self) -> None:
        """See `Carrier.close`."""
        self._inner.close()

    def __enter__(self) -> Watched:
        self._heard.clear()
        self._inner.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._inner.__exit__(*raised)

    def known(self, records: Sequence[TaskRecord]) -> list[float]:
        """By place in the order, when this process knew which task comes there; who decides dispatches."""
        return [self._heard.get(place, record.dispatched) for place, record in enumerate(records)]
