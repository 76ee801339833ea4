"""Environments that runs have always held: a run ends there as anywhere else."""

from __future__ import annotations

from tests.verification.environments.case import ALONE, SCRIPT, STEPS, Case

CASES = [
    Case(name="usual: two processes", steps=STEPS, checkpoint=STEPS),
    Case(name="usual: one process", shell=ALONE, steps=STEPS, checkpoint=STEPS),
    Case(name="usual: a script", shell=SCRIPT, says=["trained 8 steps"]),
    Case(
        name="usual: Ctrl-C",
        then={"step 2": "kill -INT $LAUNCHER; sleep 1"},
        status=130,
        says=["Ctrl-C: stopped after step 2; resumes from", "to go on: "],
        headline="Ctrl-C is passed on",
        steps=3,
        checkpoint=3,
    ),
]
