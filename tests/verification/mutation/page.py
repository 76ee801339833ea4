"""The page docs/bugs.md, made of the table."""

from __future__ import annotations

from pathlib import Path

from tests.verification.mutation.mutant import OURS, Mutant
from tests.verification.mutation.table import MUTANTS, SECTIONS

PAGE = Path(__file__).parents[3] / "docs" / "bugs.md"

HEAD = """\
# Bugs that this runtime cannot have, and the test that shows it

{published} of the bugs below were published by users and authors of other systems; the rest are mistakes that
could as easily have been made here. Each bug was put into this code, in memory, and the test beside it
failed. `python -m tests.verification.mutants` does that again, and with `--page` writes this page from the
same table (`tests/verification/mutation`).
"""

COLUMNS = (
    "| the bug | published as | why it cannot happen here | the test that finds it |\n|---|---|---|---|\n"
)


def page() -> str:
    """The whole text."""
    published = sum(mutant.source != OURS for mutant in MUTANTS)
    parts = [HEAD.format(published=published)]
    for title, mutants in SECTIONS.items():
        parts.append(f"## {title}\n\n{COLUMNS}" + "".join(map(_row, mutants)))
    return "\n".join(parts)


def _row(mutant: Mutant) -> str:
    tests = "<br>".join(f"`{test}`" for test in mutant.tests)
    return f"| {mutant.bug} | {_source(mutant.source)} | {mutant.here} | {tests} |\n"


def _source(source: str) -> str:
    """A link to an issue or pull request; GitHub leads from one to the other."""
    if source == OURS:
        return "-"
    repository, _, number = source.partition("#")
    return f"[{source}](https://github.com/{repository}/issues/{number})"
