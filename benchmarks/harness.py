"""What all benchmark commands share: flags, aims, medians, and a plain table."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Aim:
    """A figure with its limit, both in `unit`."""

    name: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value <= self.limit

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{verdict:6}  {self.name}: {self.value:.1f} {self.unit} (aim: {self.limit:g})"


def parse(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--check", action="store_true", help="exit with 1 if an aim is missed")
    return parser


def finish(options: argparse.Namespace, figures: dict[str, Any], aims: Sequence[Aim]) -> int:
    """Print the aims, write the file, and give the exit status."""
    print(*aims, sep="\n")
    if options.json:
        devices = [f"{d.platform} {d.device_kind}" for d in jax.local_devices()]
        machine = {"jax": jax.__version__, "python": platform.python_version(), "devices": devices}
        judged = [asdict(aim) | {"met": aim.met} for aim in aims]
        found = {"machine": machine, "figures": figures, "aims": judged}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    missed = [aim.name for aim in aims if not aim.met]
    if options.check and missed:
        print(f"missed: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


def median_and_p99(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    values = np.asarray(seconds) * 1e6
    median, p99 = np.percentile(values, [50, 99])
    return {"median_us": round(float(median), 1), "p99_us": round(float(p99), 1)}
