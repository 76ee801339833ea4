"""Durations from files: those of paced devices instead of a model's, and cost tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_fields, path_of, printable
from rrfp_jax.json_files import load_json
from rrfp_jax.trace.costs import CostTable, Workload

T = TypeVar("T")

MOST_BYTES = 2**30
"""Of a paced message; every stage holds some of them."""


def read_workload(path: str | Path, where: str) -> Workload:
    """The workload of a JSON file; messages begin with `where`.

    Raises:
        UsageError: no such file, or one that is no workload.
    """
    return _read(path, where, Workload.from_json_object, "workload")


def read_costs(path: str | Path, where: str) -> CostTable:
    """The cost table of a JSON file; see `read_workload`."""
    return _read(path, where, CostTable.from_json_object, "cost table")


def _read(path: str | Path, where: str, parse: Callable[[object], T], what: str) -> T:
    file = path_of("file", path)
    try:
        return parse(load_json(file))
    except OSError as error:
        raise UsageError(f"{where}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{where}: no {what}: {printable(str(error))}") from None


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Devices that last as a workload says; messages, transfers and scheduling are real.

    Attributes:
        workload: JSON file with the seconds of every task and transfer, which also says how many stages and
            microbatches there are; empty to train the model.
        message_bytes: of every activation and gradient.

    Raises:
        UsageError: no such file, one that is no workload, or messages of no bytes or more than 1 GiB.
    """

    workload: str = ""
    message_bytes: int = 65536

    def __post_init__(self) -> None:
        check_fields(self)
        if self.message_bytes < 1:
            raise UsageError(f"pace.message_bytes={self.message_bytes}: a message has at least one byte")
        if self.message_bytes > MOST_BYTES:
            raise UsageError(f"pace.message_bytes={self.message_bytes}: give at most {MOST_BYTES} bytes")
        if self.workload:
            self.table  # noqa: B018 (read now, so that a bad one is refused at once)

    @cached_property
    def table(self) -> Workload:
        """The workload."""
        return read_workload(self.workload, f"pace.workload={self.workload}")

    @property
    def stages(self) -> int:
        """Stages of the workload; 0 without one."""
        return self.table.stages if self.workload else 0
