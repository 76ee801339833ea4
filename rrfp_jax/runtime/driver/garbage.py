"""No garbage is collected while a step's tasks run: whoever is stopped for that, all stages wait for."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, Python looks for no cycles; it does soon after, on all ranks at about the same point."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
