"""What the code of layers and losses raises, as one sentence."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rrfp_jax.authors import author_of
from rrfp_jax.errors import UsageError

_PACKAGES = ("site-packages", "dist-packages")


def reason_of(error: BaseException) -> str:
    """An error's type and text, the user's line that led to it, and the innermost line of a package."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_skipped(frame.filename)]
    own = [frame for frame in frames if author_of(frame.filename) == "user"]
    inner = [frame for frame in frames if author_of(frame.filename) in ("user", "package")] or frames
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


def _is_skipped(file: str) -> bool:
    return author_of(file) == "ours" or file.startswith("<frozen ")


def _short(path: str) -> str:
    """A file's path in its package."""
    for folder in _PACKAGES:
        path = path.rpartition(f"/{folder}/")[2]
    return path
