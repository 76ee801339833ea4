"""What a run tells of its configuration: what has changed since the checkpoint, and where it comes from."""

import enum
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.runs.config import as_json, differences
from rrfp_jax.runs.files import PACKAGES, commit_of, origin_of
from rrfp_jax.typed import as_typed, typed_command, without_flag


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"learning_rate": 6e-3}, {"learning_rate": 1e-3}, ["learning_rate: 0.006 -> 0.001"]),
        ({"mesh": {"pp": 4, "tp": 1}}, {"mesh": {"pp": 2, "tp": 1}}, ["mesh.pp: 4 -> 2"]),
        ({"split": [1, 2]}, {"split": (1, 2)}, []),
        ({"name": "a", "on": True}, {"name": "b", "on": None}, ["name: a -> b", "on: true -> null"]),
        ({"old": 1}, {"new": "x"}, ["new: nothing -> x", "old: 1 -> nothing"]),
        ({"model": {}}, {"model": {"width": 3}}, ["model.width: nothing -> 3", "model: {} -> nothing"]),
        (None, {"steps": 3}, ["steps: nothing -> 3"]),
    ],
)
def test_what_has_changed(before, now, said):
    assert differences(before, now) == said


class Colour(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Odd:
    """Fields that JSON does not know, and some that it does."""

    path: Path = Path("data/text")
    colour: Colour = Colour.RED
    names: frozenset = frozenset({"b", "a"})
    tags: dict = field(default_factory=lambda: {"team": "x", 3: (1, 2)})
    parts: tuple = (Path("a"), np.int32(2))
    rate: object = np.float32(0.5)
    seed: object = np.int64(7)
    dtypes: tuple = (jnp.bfloat16, np.float32, float, np.dtype("int8"))
    nothing: None = None


def test_a_config_of_anything_is_told_as_json():
    told = as_json(Odd())
    assert (
        told
        == json.loads(json.dumps(told))
        == {
            "path": "data/text",
            "colour": "Colour.RED",
            "names": ["a", "b"],
            "tags": {"team": "x", "3": [1, 2]},
            "parts": ["a", 2],
            "rate": 0.5,
            "seed": 7,
            "dtypes": ["bfloat16", "float32", "float64", "int8"],
            "nothing": None,
        }
    )
    assert differences(told, Odd()) == []


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert commit_of(tmp_path) is None, "there is no commit yet"
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    (tmp_path / "new.py").write_text("untracked")
    assert commit_of(tmp_path) == {"commit": git(tmp_path, "rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a.py").write_text("2")
    assert commit_of(tmp_path)["dirty"]
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None, "git is missing"


def test_the_origin_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RRFP_COMMAND", "rrfp launch --config=run.py")
    file = tmp_path / "run.py"
    file.write_text("x = 1")
    found = origin_of(file)
    assert found["command"] == "rrfp launch --config=run.py"
    assert found["config_file"] == {"path": str(file), "sha256": hashlib.sha256(b"x = 1").hexdigest()}
    assert found["versions"].keys() == {"python", *PACKAGES} and all(found["versions"].values())
    assert origin_of(None)["config_file"] is None
    assert origin_of(tmp_path / "gone.py")["config_file"]["sha256"] is None


def test_the_command_that_was_typed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "rrfp_jax", "train", "--config=a b.py"])
    assert typed_command({}) == "python -m rrfp_jax train '--config=a b.py'"
    assert typed_command({"RRFP_COMMAND": "x"}) == "x"
    script = tmp_path / "rrfp"
    script.touch(mode=0o755)
    asked = [str(tmp_path / "python"), str(script), "train", "--config=a.py"]
    monkeypatch.setenv("PATH", "")
    assert as_typed(asked) == [str(script), "train", "--config=a.py"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_typed(asked) == ["rrfp", "train", "--config=a.py"]
    assert as_typed(["python", "train.py"]) == ["python", "train.py"]


def test_a_command_without_a_flag():
    assert without_flag("a --b=1 --c 2 --d", "--c") == "a --b=1 --d"
    assert without_flag("a --b=1 --c=2 --cc", "--c") == "a --b=1 --cc"
