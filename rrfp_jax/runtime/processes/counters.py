"""Numbers in a flight recorder by which its process and those who look at it tell each other something."""

from __future__ import annotations

import mmap
import struct

ASKED, ANSWERED, PLEAS, HEARD = range(4)
COUNTER = struct.Struct("<Q")
COUNTERS_SIZE = 4 * COUNTER.size


class Counters:
    """See above; each number has one writer.

    `ASKED` is written by whoever wants to know, `ANSWERED` by the process. `PLEAS` is written by the process,
    which wants to be looked at, `HEARD` by whoever did.

    Args:
        memory: of the flight recorder.
        at: where in it they are.
    """

    def __init__(self, memory: mmap.mmap | bytearray, at: int) -> None:
        self._memory, self._at = memory, at

    def __getitem__(self, which: int) -> int:
        found: int = COUNTER.unpack_from(self._memory, self._at + which * COUNTER.size)[0]
        return found

    def __setitem__(self, which: int, value: int) -> None:
        COUNTER.pack_into(self._memory, self._at + which * COUNTER.size, value)
