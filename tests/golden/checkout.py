"""An older commit in a folder of its own, with an environment of its own."""

import contextlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def worktree(commit):
    """A git worktree of a commit in a temporary folder, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        path = Path(folder) / "checkout"
        git("worktree", "add", "--quiet", "--detach", str(path), commit)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def environment(path):
    """Python of a new environment at a path, with the packages of this one, but not our own.

    Both checkouts so use the same JAX. Packages that only the older one needs must be in this environment, or
    in that of `--old-python`.
    """
    venv.create(path, with_pip=False, symlinks=True)
    (packages,) = path.glob("lib/python3.*/site-packages")
    lent = [own for own in sys.path if own.endswith("site-packages") and Path(own).is_dir()]
    (packages / "lent.pth").write_text("".join(f"{own}\n" for own in lent))
    return path / "bin" / "python"


def produced(producer, checkout, python, folder, words, before=None, limit=1200.0):
    """Run a checkout's own producer with a Python; what it printed, if it failed."""
    arguments = [
        str(python),
        "-m",
        "tests.golden.producing",
        producer,
        str(folder),
        f"--only={' '.join(words)}",
    ]
    arguments += [f"--before={before}"] if before else []
    done = subprocess.run(
        arguments,
        cwd=checkout,
        env=variables(checkout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    return f"exit status {done.returncode}\n{done.stdout}" if done.returncode else None


def variables(checkout):
    """The environment of a producer: its checkout first, no run's variables, one cache of JAX for both."""
    kept = ROOT / ".pytest_cache"
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("RRFP_", "SLURM_"))}
    fast = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    return {
        **ours,
        "PYTHONPATH": str(checkout),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": fast,
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "RRFP_KEY_FILE": str(kept / "programs.key"),
        "JAX_COMPILATION_CACHE_DIR": str(kept / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
