"""Where a run comes from: its code, the versions of what it uses, its config's file, its command line."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rrfp_jax.runtime.run.place import typed_command

PACKAGES = ("rrfp_jax", "jax", "jaxlib", "flax", "optax")

GIT_SECONDS = 5.0
"""Within which git must answer: a working directory may lie on a slow disk."""


def origin_of(file: Path | None) -> Mapping[str, Any]:
    """What `config.json` says of the origin of a run.

    Args:
        file: of its config; None if there is none.
    """
    return {
        "command": typed_command(),
        "config_file": None if file is None else {"path": _absolute(file), "sha256": _sha256(file)},
        "git": commit_of(Path()),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def commit_of(folder: Path) -> Mapping[str, Any] | None:
    """The commit that a folder is at, and whether tracked files are otherwise there; None without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changed.strip())}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says; None if it fails, is missing, or takes too long."""
    quiet: Sequence[str] = ("-c", "core.fsmonitor=false", "--no-optional-locks")
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *quiet, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _absolute(file: Path) -> str:
    try:
        return str(file.absolute())
    except OSError:  # the working directory was deleted
        return str(file)


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
