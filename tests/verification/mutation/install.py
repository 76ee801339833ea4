"""Puts a mutant into a process before anybody imports what it changes; nothing on disk is touched.

`hook/sitecustomize.py` calls `install` when Python starts. The module that the mutant changes is patched as
soon as it has been executed, so `from module import function` elsewhere gets the mutant, too. Processes that
a test starts get the same hook, whatever PYTHONPATH the test gives them.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property, update_wrapper
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.verification.mutation.table import Mutant, mutants

HOOK = Path(__file__).parent / "hook"
MUTANT, REACHED = "RRFP_TEST_MUTANT", "RRFP_TEST_MUTANT_REACHED"


def variables(mutant: Mutant, reached: Path) -> dict[str, str]:
    """The environment of a process with a mutant; `reached` is a file made when the mutant runs."""
    return {MUTANT: mutant.id, REACHED: str(reached), "PYTHONPATH": _with_hook(os.environ)}


def install(name: str) -> None:
    """Let this process, and all that it starts, have the mutant of this name."""
    mutant = next(mutant for mutant in mutants() if mutant.id == name)
    sys.meta_path.insert(0, _Finder(mutant))
    popen = subprocess.Popen.__init__

    def hooked(self: Any, *args: Any, **kwargs: Any) -> None:
        if (env := kwargs.get("env")) is not None:
            own = {name: os.environ[name] for name in (MUTANT, REACHED)}
            kwargs["env"] = {**env, **own, "PYTHONPATH": _with_hook(env)}
        popen(self, *args, **kwargs)

    subprocess.Popen.__init__ = hooked  # type: ignore[method-assign]


def _with_hook(env: Any) -> str:
    others = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(HOOK))]
    return os.pathsep.join([str(HOOK), *others])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, and patches it once it has been executed."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """The module's own spec, with a loader that patches."""
        if fullname != self._mutant.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None, fullname
        execute = spec.loader.exec_module

        def patching(module: ModuleType) -> None:
            execute(module)
            put_in(self._mutant, module)

        spec.loader.exec_module = patching  # type: ignore[method-assign]
        return spec


def put_in(mutant: Mutant, module: ModuleType) -> None:
    """Replace what the mutant changes in its module."""
    *owners, name = mutant.attributes
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, name)
    if isinstance(found, property):
        replaced: Any = property(_noted(mutant, found.fget))
    elif isinstance(found, cached_property):
        replaced = cached_property(_noted(mutant, found.func))
        replaced.__set_name__(owner, name)
    elif isinstance(found, (classmethod, staticmethod)):
        replaced = type(found)(_noted(mutant, found.__func__))
    else:
        replaced = _noted(mutant, found)
    setattr(owner, name, replaced)


def _noted(mutant: Mutant, original: Any) -> Callable[..., Any]:
    """The mutant of a function; its first call leaves a file."""
    changed, reached = mutant.make(original), os.environ.get(REACHED)

    def noting(*args: Any, **kwargs: Any) -> Any:
        nonlocal reached
        if reached is not None:
            Path(reached).touch()
            reached = None
        return changed(*args, **kwargs)

    return update_wrapper(noting, original)
