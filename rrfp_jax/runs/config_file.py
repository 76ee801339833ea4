"""Reading the file that a run's config is in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import check_path
from rrfp_jax.runs.config import RunConfig
from rrfp_jax.user_code import called


def load_config(path: str) -> RunConfig:
    """The `get_config()` of a Python file.

    Raises:
        UsageError: no such file, no `get_config` in it, or one that returns no RunConfig; or the file, or
            `get_config`, raised something, which is told with the traceback of that file.
    """
    name = f"--config={path}"
    check_path("--config", path)
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{name}: no such file; give a Python file with get_config(), see configs/")
    if file.suffix != ".py":
        raise UsageError(f"{name}: is no Python file; its name must end with .py")
    spec = importlib.util.spec_from_file_location(f"_rrfp_config_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with called(f"{name}: the file", UsageError):
        spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UsageError(f"{name}: the file has no function get_config()")
    with called(f"{name}: get_config()", UsageError):
        config = get_config()
    if not isinstance(config, RunConfig):
        raise UsageError(f"{name}: get_config() returned {type(config).__name__}, not a rrfp.RunConfig")
    return config
