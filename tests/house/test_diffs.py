"""How many files of the package a new idea touches: a diff that adds a made-up one is applied, and works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIFFS = Path(__file__).parent / "diffs"
LIMIT_SECONDS = 120.0


def applied(name, folder):
    """A copy of the package with a diff applied, in a folder; the files of the package that it touches."""
    shutil.copytree(ROOT / "rrfp_jax", folder / "rrfp_jax", ignore=shutil.ignore_patterns("__pycache__"))
    diff = (DIFFS / name).read_text(encoding="utf-8")
    git = ["git", "apply", "--verbose", "-"]
    done = subprocess.run(git, cwd=folder, input=diff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    touched = {line.removeprefix("+++ b/") for line in diff.splitlines() if line.startswith("+++ b/")}
    assert touched and all((folder / file).exists() for file in touched)
    return {file for file in touched if file.startswith("rrfp_jax/")}


def last_line(module, folder):
    """What a module of the tests prints at its end, beside the package in a folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_a_transport_touches_two_files(tmp_path):
    """Its own module, and the one whose table names it; it passes the scenarios that all transports must."""
    assert len(applied("transport.diff", tmp_path)) == 2
    assert last_line("tests.support.made_up_transport", tmp_path) == "by pigeons: 11 scenarios"


@pytest.mark.slow(reason="9 s: a copy of the package that trains")
def test_a_kind_of_task_touches_seven_files(tmp_path):
    """A recomputation between forward and backward: a Trainer runs it, views and the simulator know it."""
    assert len(applied("kind.diff", tmp_path)) == 7
    ran = last_line("tests.support.made_up_kind", tmp_path)
    assert ran == "recomputation: F0 F1 R0 R1 B0 F2 B1 F3 R2 R3 B2 B3"
