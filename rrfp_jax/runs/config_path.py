"""The file that a run's config is in, by its name; here nothing of it is read, and JAX is not imported."""

from __future__ import annotations

from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import path_of


def config_path(given: str) -> Path:
    """What `--config=` was given.

    Raises:
        UsageError: it is no Python file.
    """
    name = f"--config={given}"
    file = path_of("--config", given)
    if not file.is_file():
        raise UsageError(f"{name}: no such file; give a Python file with get_config(), see configs/")
    if file.suffix != ".py":
        raise UsageError(f"{name}: is no Python file; its name must end with .py")
    return file
