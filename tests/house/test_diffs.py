"""How many files of the package a new idea touches: a diff that adds a made-up one is applied, and works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_a_transport_touches_two_files(tmp_path):
    """Its own module, and the one whose table names it; it passes the scenarios that all transports must."""
    assert len(applied("transport.diff", tmp_path)) == 2
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.made_up_transport"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "by pigeons: 11 scenarios"
