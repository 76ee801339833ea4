"""Ranks of a run on nodes, each started by hand, as on machines without a scheduler."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tests.nodes.nodes import Nodes
from tests.support.kept import FAST_COMPILING

ROOT = Path(__file__).parents[2]
PORT = 9876
Ranks: TypeAlias = list[subprocess.Popen[Any]]


def start(
    nodes: Nodes,
    on: Sequence[str],
    command: Sequence[Any],
    folder: Path,
    more: Mapping[str, str] | None = None,
) -> Ranks:
    """Start a rank on each of the nodes named; what rank 2 prints is added to `rank-2` in a folder."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RRFP_")}
    own |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    own |= {"XLA_FLAGS": FAST_COMPILING, "RRFP_TOKEN": uuid.uuid4().hex, "RRFP_PROCESSES": str(len(on))}
    own |= {"RRFP_COORDINATOR": f"{nodes.addresses[on[0]]}:{PORT}", **(more or {})}
    folder.mkdir(parents=True, exist_ok=True)
    ranks = []
    for rank, node in enumerate(on):
        with (folder / f"rank-{rank}").open("ab") as out:
            environment = own | {"RRFP_RANK": str(rank)}
            ranks.append(nodes.start(node, *command, folder=ROOT, env=environment, stdout=out, stderr=out))
    return ranks


def said(folder: Path, rank: int) -> str:
    """What a rank has printed."""
    return (folder / f"rank-{rank}").read_text(encoding="utf-8", errors="replace")
