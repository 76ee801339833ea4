"""Files that are written to the disk, and read back only if they are what was written."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from rrfp_jax.files import opened
from rrfp_jax.json_files import Count

LARGEST_SMALL_FILE = 2**28
"""Bytes of a file that is read at once."""

Checksum = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

Written: TypeAlias = tuple[Count, Checksum]
"""Bytes and CRC-32 of a file."""


class Damaged(Exception):
    """A file is not what was written; the message names it."""


def write_file(path: Path, content: bytes) -> Written:
    """Write a file so that it is on the disk on return.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # a network file system may tell only now that it is full
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # write() names no file
    return len(content), zlib.crc32(content)


def read_file(path: Path, checksum: int, into: memoryview) -> None:
    """Read a file that fills the buffer.

    Raises:
        Damaged: it is missing, no file, too short or long, or has other bytes.
    """
    with of_size(path, len(into)) as descriptor:
        at = 0
        while at < len(into) and (count := os.readv(descriptor, [into[at:]])):
            at += count
    if zlib.crc32(into) != checksum:
        raise Damaged(f"{path} has other bytes than were written")


def read_small(path: Path, written: Written) -> bytes:
    """A file of known size and checksum; memory is taken once it is known to have that size.

    Raises:
        Damaged: see `read_file`.
    """
    size, checksum = written
    with of_size(path, size):
        content = bytearray(size)
    read_file(path, checksum, memoryview(content))
    return bytes(content)


@contextmanager
def of_size(path: Path, size: int) -> Iterator[int]:
    """A file of so many bytes, opened for reading, as a descriptor.

    Raises:
        Damaged: it is missing, no file, or has another size.
    """
    try:
        with opened(path) as descriptor:
            actual = os.fstat(descriptor).st_size
            if actual != size:
                raise Damaged(f"{path} has {actual} bytes instead of {size}")
            yield descriptor
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from None
