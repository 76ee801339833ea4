"""What a program's kernels on a GPU read and write, by its HLO text (`rrfp compile --hlo=FOLDER`)."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import NamedTuple

WIDTHS = {"pred": 8, "bf16": 16} | {f"{sort}{bits}": bits for sort in "sufc" for bits in (8, 16, 32, 64, 128)}
"""Bits of an element."""

ARRAY = re.compile(rf"\b({'|'.join(WIDTHS)})\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?(%[\w.-]+) = (\([^)]*\)|\S+) ([\w-]+)\((.*?)\)(?:, |$)")
NO_KERNELS = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"}


class Traffic(NamedTuple):
    """Of one run of a program; what a kernel keeps to itself does not count."""

    kernels: int
    bytes: int


def traffic(text: str) -> Traffic:
    """Count in the entry computation of an HLO module after all optimizations."""
    _, _, entry = text.partition("\nENTRY ")
    sizes: dict[str, int] = {}
    found = Traffic(0, 0)
    for line in entry.splitlines()[1:]:
        match = INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))
        if match is None:
            continue
        name, shape, operation, operands = match.groups()
        sizes[name] = _nbytes(shape)
        if operation not in NO_KERNELS:
            read = sum(sizes.get(one, 0) for one in set(re.findall(r"%[\w.-]+", operands)))
            found = Traffic(found.kernels + 1, found.bytes + sizes[name] + read)
    return found


def traffic_of(folder: Path) -> dict[str, Traffic]:
    """Of every program in a folder, by the name of its file."""
    return {file.stem: traffic(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.txt"))}


def _nbytes(shape: str) -> int:
    """Of an array, or of the arrays of a tuple."""
    return sum(
        WIDTHS[dtype] * prod(int(size) for size in sizes.split(",") if size) // 8
        for dtype, sizes in ARRAY.findall(shape)
    )
