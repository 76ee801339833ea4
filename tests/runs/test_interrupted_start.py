"""What a run says of Ctrl-C before its first step."""

import signal
from contextlib import closing
from types import SimpleNamespace

import pytest

from rrfp_jax.runs.config import Checkpointing
from rrfp_jax.runs.display import Display
from rrfp_jax.runs.run import Stopping
from tests.scripts.toy_run import ToyRun


@pytest.mark.parametrize(
    ("restarts", "every_steps", "expected"),
    [
        ("0", 0, "nothing was trained yet"),
        ("1", 0, "what only the host's memory has is lost, as the run saves no checkpoints"),
        ("1", 5, "the launcher saves next what only the host's memory has"),
    ],
)
def test_what_becomes_of_the_state_in_memory(monkeypatch, tmp_path, restarts, every_steps, expected):
    monkeypatch.setattr("rrfp_jax.runs.run.fail", lambda world, error: None)
    monkeypatch.setenv("RRFP_HOST_MEMORY", str(tmp_path))
    monkeypatch.setenv("RRFP_RESTARTS", restarts)
    said, world = [], SimpleNamespace(rank=0, size=1, folder=tmp_path)
    display = SimpleNamespace(say=said.append, close=lambda: None)
    config = ToyRun(
        name="toy", steps=9, directory=str(tmp_path), checkpoint=Checkpointing(every_steps=every_steps)
    )
    Stopping(config, world, display).at_start().heed(signal.SIGINT)
    assert said[0].startswith(f"Ctrl-C while starting: ends; {expected}\n")


def test_another_rank_with_a_terminal_of_its_own_says_it_there(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("rrfp_jax.runs.run.fail", lambda world, error: None)
    monkeypatch.setattr("rrfp_jax.printing.is_terminal", lambda: True)
    world = SimpleNamespace(rank=1, size=2, folder=None)
    with closing(Display(9, silent=True)) as display:
        Stopping(ToyRun(name="toy", steps=9, directory=str(tmp_path)), world, display).at_start().heed(2)
    assert capsys.readouterr().out.startswith("Ctrl-C while starting: ends; nothing was trained yet\n")
