"""What tests of refusals share."""

import pytest

from rrfp_jax.runtime.programs.gradients import SumPrograms
from rrfp_jax.runtime.programs.segments import OnDevices


@pytest.fixture
def nothing_compiles(monkeypatch):
    for programs, method in ((OnDevices, "lower"), (SumPrograms, "compile")):
        monkeypatch.setattr(programs, method, lambda *args: pytest.fail("compiled before refusing"))
