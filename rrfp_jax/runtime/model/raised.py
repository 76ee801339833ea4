"""What the code of layers and losses raises, as one sentence."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import jax

from rrfp_jax.errors import UsageError

_OURS, _JAX = str(Path(__file__).parents[2]), str(Path(jax.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = ("site-packages", "dist-packages")


def reason_of(error: BaseException) -> str:
    """An error's type and text, the user's line that led to it, and the innermost line of a package."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _whose(frame) != "ours"]
    own = [frame for frame in frames if _whose(frame) == "user"]
    inner = [frame for frame in frames if _whose(frame) in ("user", "package")] or frames
    where = [f"{Path(frame.filename).name}, line {frame.lineno}" for frame in own[-1:]]
    if inner and inner[-1:] != own[-1:]:
        where.append(f"raised in {_short(inner[-1].filename)}, line {inner[-1].lineno}")
    return f"{text} ({'; '.join(where)})" if where else text


@contextmanager
def named(who: str, failed: str) -> Iterator[None]:
    """Inside, users' code runs.

    Args:
        who: the layer.
        failed: what went wrong if anything is raised, as a sentence about the layer goes on.

    Raises:
        UsageError: whatever was raised, as one sentence.
    """
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{who}: {error}") from None
    except Exception as error:
        raise UsageError(f"{who} {failed}: {reason_of(error)}") from error


def _whose(frame: traceback.FrameSummary) -> Literal["ours", "jax", "standard", "package", "user"]:
    path = frame.filename
    if path.startswith((_OURS, "<frozen")):
        return "ours"
    if path.startswith(_JAX):
        return "jax"
    if any(f"/{folder}/" in path for folder in _PACKAGES):
        return "package"
    return "standard" if path.startswith(_STANDARD) else "user"


def _short(path: str) -> str:
    """A file's path in its package."""
    for folder in _PACKAGES:
        path = path.rpartition(f"/{folder}/")[2]
    return path
