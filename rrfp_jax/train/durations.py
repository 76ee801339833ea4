"""Durations from files: workloads, and cost tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of, printable
from rrfp_jax.json_files import load_json
from rrfp_jax.trace.costs import CostTable, Workload

T = TypeVar("T")


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
