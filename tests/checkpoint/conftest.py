"""Checkpoints in a folder of the test."""

import pytest
import tensorstore as ts

from rrfp_jax.checkpoint import format
from rrfp_jax.checkpoint.saving import Checkpoints
from rrfp_jax.runtime.run.world import World


@pytest.fixture
def unsynced(monkeypatch):
    """Nothing here outlives the machine, so nobody waits for its disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    context = ts.Context({**format.context().spec.to_json(), "file_io_sync": False})
    monkeypatch.setattr(format, "context", lambda: context)


@pytest.fixture
def made(tmp_path):
    """A function that makes the checkpoints of a folder, and what they have said."""
    said = []

    def make(**kwargs):
        return Checkpoints(tmp_path / "checkpoints", World(), say=said.append, **kwargs)

    make.said, make.folder = said, tmp_path / "checkpoints"
    return make
