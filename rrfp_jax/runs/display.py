"""Progress of a run: a live line with a bar on a terminal, plain lines elsewhere.

Under a launcher that prints to a terminal steps are plain lines, and what lasts is a live one.

Both count alike: "step 0" is the first one, as in `metrics.jsonl`.
"""

from __future__ import annotations

import sys
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from rrfp_jax import printing
from rrfp_jax.printing import Lenient, is_terminal
from rrfp_jax.progress import Doing
from rrfp_jax.report.progress_line import LIVE_AFTER, LIVE_EVERY, Lasting, printed_lines
from rrfp_jax.train.report import Evaluation, Report


class Display:
    """Shows reports, and what lasts, as they come, until it is closed."""

    def __init__(self, steps: int, silent: bool = False) -> None:
        self._live: Progress | None = None
        self._silent = silent
        self._latest = "starting"  # what stands beside the bar while nothing else lasts
        self._lasting = printed_lines(self.say)
        if is_terminal() and not silent:
            self._live = Progress(
                BarColumn(bar_width=20),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
                expand=True,
                console=Console(file=cast(TextIO, Lenient(sys.stdout))),
            )
            self._task = self._live.add_task(self._latest, total=steps)
            self._lasting = Lasting(self._describe, self._ended, LIVE_AFTER, LIVE_EVERY)
            self._live.start()

    def close(self) -> None:
        """Leave the terminal in order; from any thread, also twice."""
        self._lasting.close()
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print lines, above the bar if there is one; from any thread."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif not self._silent:
            printing.say(text)

    def tell(self, doing: Doing) -> None:
        """Show what lasts; a listener."""
        if not self._silent:
            self._lasting(doing)

    def show(self, report: Report, validation: Evaluation | None) -> None:
        """Show one step, and the validation that followed it."""
        checked = f"  validation {validation.loss:.4f}" if validation is not None else ""
        if self._live is None:
            self.say(f"{report}{checked}")
            return
        self._latest = str(report)
        self._live.update(self._task, completed=report.step + 1, description=self._latest)
        if checked:
            self.say(f"step {report.step:5d}  loss {report.loss:.4f}{checked}")

    def _describe(self, text: str) -> None:
        if self._live is not None:
            self._live.update(self._task, description=text)

    def _ended(self, text: str) -> None:
        self._describe(self._latest)
