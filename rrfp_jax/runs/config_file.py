"""Reading the file that a run's config is in.

Modules beside the file can be imported from it, as if it were run as a script: its folder is where Python
looks first. Every process of a run reads the file, so this holds in all of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.runs.config_path import config_path
from rrfp_jax.user_code import called, own_traceback

RELATIVE = "attempted relative import"
"""How Python begins to say that a module is in no package."""


def load_config(path: str) -> RunConfig:
    """The `get_config()` of a Python file.

    Raises:
        UsageError: no such file, no `get_config` in it, or one that returns no RunConfig; or the file, or
            `get_config`, raised something, which is told with the traceback of that file.
    """
    file, name = config_path(path), f"--config={path}"
    folder = str(file.parent.absolute())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(_module_name(file), file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with called(f"{name}: the file", UsageError):
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            if not str(error).startswith(RELATIVE):
                raise
            raise UsageError(
                f"{name}: a config file is in no package, so nothing can be imported relative to it; Python "
                f"looks in its folder first: write `from my_model import ...` for a my_model.py beside it"
                f"{own_traceback(error)}"
            ) from None
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UsageError(f"{name}: the file has no function get_config()")
    with called(f"{name}: get_config()", UsageError):
        config = get_config()
    if not isinstance(config, RunConfig):
        raise UsageError(f"{name}: get_config() returned {type(config).__name__}, not a rrfp.RunConfig")
    return config


def _module_name(file: Path) -> str:
    """The name by which Python imports the file; one of ours if that name would lead elsewhere.

    A worker that a data loader has spawned imports the file by this name, to find what it is to call.
    """
    found, known = PathFinder.find_spec(file.stem), sys.modules.get(file.stem)
    places = [found and found.origin, *([getattr(known, "__file__", None)] if known is not None else [])]
    leads_there = all(place and os.path.exists(place) and os.path.samefile(place, file) for place in places)
    return file.stem if leads_there else f"_rrfp_config_{file.stem}"
