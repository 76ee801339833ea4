"""Who used JAX first in this process, which after that can join no run and get no virtual CPU devices."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rrfp_jax.authors import is_of
from rrfp_jax.runtime.processes.stacks import Frame

PASSED_OVER = ("jax", "jaxlib", "flax")
"""Packages that use JAX because somebody calls them."""


class WhenImported:
    """A finder for `sys.meta_path`: as soon as JAX has been imported, `runtime/_jax.py` looks on."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("jax")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_look(module: ModuleType) -> None:
                execute(module)
                look_on()

            spec.loader.exec_module = then_look  # type: ignore[method-assign]
        return spec


def look_on() -> None:
    """Have the first use of JAX noted, from now on or as soon as JAX has been imported."""
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, WhenImported())  # type: ignore[arg-type]
        return
    with suppress(ImportError, AttributeError):  # a version that we do not know, as whoever needs it will say
        import rrfp_jax.runtime._jax  # noqa: F401


def first_used(stack: Sequence[tuple[str, int, str]] | None) -> str:
    """Where JAX was used first, as a clause: the line that did it, and the user's own line behind it.

    Args:
        stack: of that moment, innermost first: file, line, function; None if nobody looked on.
    """
    frames = [Frame(*one) for one in stack or ()]
    frames = [one for one in frames if one.whose != "ours" and not one.file.startswith("<frozen")]
    direct = next((one for one in frames if not any(is_of(one.file, name) for name in PASSED_OVER)), None)
    users = next((one for one in frames if one.whose == "user"), direct)
    if direct is None or users is None:
        return "by code that ran before `import rrfp_jax` (put that first, and this message names the line)"
    return f"by {_line(direct)}" + ("" if users == direct else f", reached from {_line(users)}")


def _line(frame: Frame) -> str:
    text = linecache.getline(frame.file, frame.line).strip()
    return f"{frame.file}:{frame.line}" + (f" (`{text}`)" if text else "")
