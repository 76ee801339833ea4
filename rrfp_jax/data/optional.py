"""Packages that only some data needs."""

from __future__ import annotations

import importlib
from typing import Any

from rrfp_jax.errors import UsageError


def imported(package: str, purpose: str, install: str = "") -> Any:
    """The package, or the module of one.

    Args:
        package: as it is imported.
        purpose: what needs it.
        install: what pip calls it, if otherwise.

    Raises:
        UsageError: it is not installed; says what for it is needed and how to get it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UsageError(
            f"{purpose} needs the package {package}, which cannot be imported ({error}): "
            f"pip install {install or package}"
        ) from error
