"""The quickstart with data that takes its time, for `benchmarks.runtime.spoilt`; a config like any other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from time import sleep
from typing import Any

import rrfp_jax as rrfp
from configs import quickstart


@dataclass(frozen=True, kw_only=True)
class LateData(quickstart.Quickstart):
    """The quickstart's model and text."""

    load_seconds: float = 0.0  # that loading a microbatch takes longer

    def train_data(self) -> Any:
        """The quickstart's, late."""
        return _Late(super().train_data(), self.load_seconds)


@dataclass(frozen=True)
class _Late:
    """Data that takes so many seconds more a microbatch."""

    inner: Any
    seconds: float

    def plan(self, step: int) -> Sequence[rrfp.Microbatch]:
        microbatches: Sequence[rrfp.Microbatch] = self.inner.plan(step)
        return microbatches

    def load(self, microbatch: rrfp.Microbatch, names: Collection[str]) -> Mapping[str, Any]:
        sleep(self.seconds)
        arrays: Mapping[str, Any] = self.inner.load(microbatch, names)
        return arrays


def get_config() -> LateData:
    """Nothing late."""
    known = quickstart.get_config()
    return LateData(**{field.name: getattr(known, field.name) for field in fields(known)})
