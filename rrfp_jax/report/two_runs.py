"""Two runs side by side: where a step's time went in each, what changes would save, what differs in them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from rrfp_jax.report import charts
from rrfp_jax.report.charts import history
from rrfp_jax.report.explanation import Explanation
from rrfp_jax.report.run_folder import Run
from rrfp_jax.report.sections import HISTORY, WHAT_IF, Section, timeline_note, title_of
from rrfp_jax.report.sentence import MEANING
from rrfp_jax.report.step_charts import timeline
from rrfp_jax.sim.what_if import TRUSTED_ERROR

ABSENT = "-"

SAME = 0.0005
"""A smaller difference, as a share, is none."""


@dataclass(frozen=True)
class TwoRuns:
    """Two runs and their explanations. Printed it is their sentences and three tables."""

    runs: tuple[Run, Run]
    explanations: tuple[Explanation, Explanation]

    @property
    def names(self) -> tuple[str, str]:
        """By which the runs are told apart."""
        first, second = (run.name for run in self.runs)
        return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")

    @property
    def sentences(self) -> list[str]:
        """How their steps compare, then what matters most in each."""
        one, two = (explanation.seconds for explanation in self.explanations)
        faster, share = (1, 1 - two / one) if two <= one else (0, 1 - one / two)
        compared = (
            f"A step of {self.names[faster]} takes {share:.1%} less time: {min(one, two) * 1e3:.1f} ms "
            f"instead of {max(one, two) * 1e3:.1f} ms (means of the traced steps)."
        )
        if share < SAME:
            compared = f"Steps of both take equally long: {one * 1e3:.1f} ms (means of the traced steps)."
        causes = zip(self.names, self.explanations, strict=True)
        return [compared, *(f"{name}: {explanation.sentence}" for name, explanation in causes)]

    def __str__(self) -> str:
        text = io.StringIO()
        console = Console(file=text, width=110)
        for sentence in self.sentences:
            console.print(sentence, highlight=False)
        for rows in (self.seconds(), self.savings(), self.settings()):
            if len(rows) > 1:
                console.print(_printed(rows), highlight=False)
        return text.getvalue().rstrip()

    def seconds(self) -> list[list[str]]:
        """Of a step, by cause: in each run, and how much more in the second; the first row is the head."""
        rows = [["where a step's time went", *self.names, "difference"]]
        one, two = self.explanations
        wholes = [explanation.seconds for explanation in self.explanations]
        rows.append(["all", *_two_times(*wholes)])
        for name, meaning in MEANING.items():
            a, b = one.shares[name] * wholes[0], two.shares[name] * wholes[1]
            if max(one.shares[name], two.shares[name]) >= 0.0005:
                shares = [f" ({of.shares[name]:.1%})" for of in (one, two)]
                first, second, difference = _two_times(a, b)
                rows.append([meaning, first + shares[0], second + shares[1], difference])
        return rows

    def savings(self) -> list[list[str]]:
        """What changes would save in each run; the first row is the head."""
        found = [{saving.change: saving.share for saving in of.savings} for of in self.explanations]
        changes = sorted(
            dict.fromkeys([*found[0], *found[1]]),
            key=lambda change: -max(own.get(change, 0.0) for own in found),
        )
        rows = [["what if", *self.names]]
        for change in changes:
            rows.append([change, *(f"{own[change]:.1%}" if change in own else ABSENT for own in found)])
        return rows

    def settings(self) -> list[list[str]]:
        """The fields of their configs that differ; the first row is the head."""
        one, two = (run.settings for run in self.runs)
        rows = [["setting", *self.names]]
        if one and two:
            for name in dict.fromkeys([*one, *two]):
                values = [own.get(name, ABSENT) for own in (one, two)]
                if values[0] != values[1]:
                    rows.append([name, *values])
        return rows


def both_sections(runs: TwoRuns) -> list[Section]:
    """The parts of their page; times on the same axes."""
    named = dict(zip(runs.names, runs.explanations, strict=True))
    lasts = [run.steps[-1].recorded for run in runs.runs]
    longest = max(last.trace.makespan for last in lasts)
    seconds = {name: of.seconds for name, of in named.items()}
    bars = charts.shares({name: of.shares for name, of in named.items()}, seconds)
    savings = runs.savings()
    settings = runs.settings()
    found = [
        Section("Where the time went", "", bars, runs.seconds()),
        Section(
            "What differs in their settings",
            "" if len(settings) > 1 else "Nothing, or not both have a config.json.",
            table=settings if len(settings) > 1 else (),
        ),
        Section("What if", f"{WHAT_IF} {_trust(named)}", table=savings if len(savings) > 1 else ()),
    ]
    found += [
        Section(f"{name}: {title_of(last).lower()}", timeline_note(last), timeline(last, longest))
        for name, last in zip(runs.names, lasts, strict=True)
    ]
    found += [
        Section(f"{name}: how each stage spent it", "", charts.stages(last, longest))
        for name, last in zip(runs.names, lasts, strict=True)
    ]
    histories = {name: run.history for name, run in zip(runs.names, runs.runs, strict=True) if run.history}
    if histories:
        found.append(Section("All steps", HISTORY, history(histories)))
    return found


def _trust(named: Mapping[str, Explanation]) -> str:
    off = " and ".join(f"{of.error:.1%} off on {name}" for name, of in named.items())
    return (
        f"As the steps were, the simulator is {off}; above {TRUSTED_ERROR:.0%} it predicts nothing. A dash: "
        f"not among the largest savings of that run."
    )


def _two_times(one: float, two: float) -> list[str]:
    """In ms, and the difference."""
    difference = round((two - one) * 1e3, 1) + 0.0  # not -0.0
    return [f"{one * 1e3:.1f} ms", f"{two * 1e3:.1f} ms", f"{difference:+.1f} ms"]


def _printed(rows: Sequence[Sequence[str]]) -> Table:
    head, *others = rows
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in others:
        table.add_row(*row)
    return table
