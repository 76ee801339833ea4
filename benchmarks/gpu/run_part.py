"""One part in this process: `python -m benchmarks.gpu.run_part MODULE FILE FOLDER SECONDS full|quick`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import jax

from benchmarks.gpu.findings import Findings


def main(module: str, file: str, folder: str, seconds: str, size: str) -> None:
    """Measure, and leave the findings in the file."""
    found = Findings(Path(file), Path(folder), quick=size == "quick", seconds=float(seconds))
    platform = jax.devices()[0].platform
    if platform == "cpu" and not found.quick:
        found.fail("JAX found no GPU here, only cpu; --quick runs on one")
    else:
        importlib.import_module(module).measure(found)
    found.conclude()


if __name__ == "__main__":
    main(*sys.argv[1:])
