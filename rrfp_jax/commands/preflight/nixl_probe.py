"""Writes from one process of this machine to another by NIXL, as a program of its own.

UCX prints which way it takes for that (`UCX_PROTO_INFO`), and the doctor reads it (`ways_in`). Exit status 0:
it worked; else the last line says why not.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
from multiprocessing.connection import Connection

from rrfp_jax.nixl.agent import Agent, MemoryRange, NixlAbsent, WriteFailed

SIZE = 2**16
LIMIT_SECONDS = 20.0


def ways_in(printed: str) -> list[str]:
    """The ways of writing that UCX has printed, such as "cma/memory" or "tcp/eth0"."""
    ways: list[str] = []
    inside = False
    for line in printed.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            inside = "remote memory write by ucp_put" in cells[0] or (inside and "cfg#" in cells[0])
        elif inside and len(cells) == 3 and ".." in cells[0]:
            ways.append(cells[2])
    return list(dict.fromkeys(ways))


def _memory(buffer: ctypes.Array[ctypes.c_char]) -> MemoryRange:
    return MemoryRange(ctypes.addressof(buffer), SIZE, 0)


def _receive(line: Connection) -> None:
    """Give a place, and wait until it may go."""
    agent, buffer = Agent(False, True), ctypes.create_string_buffer(SIZE)
    agent.register([_memory(buffer)])
    line.send((agent.metadata, _memory(buffer)))
    line.recv()
    line.send(buffer.raw == b"x" * SIZE)


def _write() -> None:
    """Write once to another process.

    Raises:
        NixlAbsent: NIXL cannot be used.
        WriteFailed: that did not work.
    """
    agent = Agent(False, True)
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    spawn.Process(target=_receive, args=(its,), daemon=True).start()
    if not mine.poll(LIMIT_SECONDS):
        raise WriteFailed(f"the other process has made no agent in {LIMIT_SECONDS:.0f} s")
    agent.peers[1], there = mine.recv()
    buffer = ctypes.create_string_buffer(b"x" * SIZE, SIZE)
    agent.register([_memory(buffer)])
    agent.write_within(LIMIT_SECONDS, 1, [_memory(buffer)], [there])
    mine.send(None)
    if not mine.recv():
        raise WriteFailed("what was written is not there")


if __name__ == "__main__":
    try:
        _write()
    except (NixlAbsent, WriteFailed) as error:
        sys.exit(str(error))
