"""The toy run with steps that take a while, so that a signal comes before the last one."""

import time
from dataclasses import dataclass

import rrfp_jax as rrfp
from tests.scripts.toy_run import ToyRun


@dataclass(frozen=True, kw_only=True)
class PacedRun(ToyRun):
    pace: float = 0.3  # seconds that a step takes at least

    def on_step(self, report):
        time.sleep(self.pace)


def get_config():
    return PacedRun(name="toy", steps=200, mesh=rrfp.Mesh(pp=4))
