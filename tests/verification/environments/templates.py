"""The files that a case's run is made of: a config, and a script of the user's own."""

from __future__ import annotations

from textwrap import indent

from tests.verification.environments.case import EVERY, STEPS, Case

WATCHED = """\
{at_import}
import os, time

rank = int(os.environ.get("RRFP_RANK", "0"))


def moment(name):
    if rank == 0 and name in os.environ["MOMENTS"].split(","):
        path = os.path.join(os.environ["WATCH"], name.replace(" ", "-"))
        open(path + ".reached", "w").close()
        deadline = time.monotonic() + 400
        while not os.path.exists(path + ".done") and time.monotonic() < deadline:
            time.sleep(0.01)


def after(step):
    moment(f"step {{step}}")
{at_step}


if "RRFP_RANK" in os.environ or "launch" not in " ".join(__import__("sys").orig_argv):
    moment("import")
"""

CONFIG = """
from dataclasses import dataclass

import rrfp_jax as rrfp
from rrfp_jax.runs.config import Checkpointing
from tests.scripts.toy_run import ToyRun


@dataclass(frozen=True, kw_only=True)
class Run(ToyRun):
    def pipeline(self):
        moment("build")
        return super().pipeline()

    def on_step(self, report):
        after(report.step)


def get_config():
    checkpoint = Checkpointing(every_steps={every})
    return Run(name="trial", steps={steps}, mesh=rrfp.Mesh(pp=2), checkpoint=checkpoint)
"""

SCRIPT = """
from tests.support import toy

if __name__ == "__main__":
    moment("build")
    trainer = toy.trainer(2)
    for report in trainer.steps({steps}):
        after(report.step)
    if trainer.is_main:
        print("trained", report.step + 1, "steps", flush=True)
"""


def files_of(case: Case) -> dict[str, str]:
    """By name, the Python files of a case's folder."""
    at_step = indent(case.at_step, "    ")
    watched = WATCHED.format(at_import=case.at_import, at_step=at_step)
    return {
        "run.py": watched + CONFIG.format(steps=STEPS, every=EVERY),
        "script.py": watched + SCRIPT.format(steps=STEPS),
    }
