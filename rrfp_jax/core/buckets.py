"""Shape buckets: microbatches of equal shapes share programs, and what they take in time and memory."""

from __future__ import annotations

from typing import TypeAlias

Bucket: TypeAlias = tuple[tuple[str, tuple[int, ...], str], ...]
"""The shapes of a microbatch: (name, shape, dtype) of every field, sorted by name."""


def bucket_name(bucket: Bucket) -> str:
    """A bucket as text: "labels int32[4,128] tokens int32[4,128]"."""
    return " ".join(f"{name} {dtype}[{','.join(map(str, shape))}]" for name, shape, dtype in bucket)
