"""Progress: a live bar on a terminal, a plain line per step elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rrfp_jax.runs.paced import PacedReport
from rrfp_jax.train.report import Evaluation, Report


class Display:
    """Shows reports as they come. Use as a context manager, so that the terminal is left in order.

    Args:
        steps: of the run.
        silent: show nothing: another process does.
    """

    def __init__(self, steps: int, silent: bool = False) -> None:
        self._live: Progress | None = None
        self._silent = silent
        if sys.stdout.isatty() and not silent:
            self._live = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=Console(),
            )
            self._task = self._live.add_task("starting", total=steps)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, report: Report | PacedReport, validation: Evaluation | None) -> None:
        """Show one step, and the validation that followed it."""
        if self._silent:
            return
        checked = f"  validation {validation.loss:.4f}" if validation is not None else ""
        if self._live is None:
            print(f"{report}{checked}", flush=True)
            return
        self._live.update(self._task, completed=report.step + 1, description=report.summary)
        if checked and isinstance(report, Report):
            self._live.console.print(f"step {report.step}: loss {report.loss:.4f}{checked}")
