"""Frames: four bytes of length and a msgpack list [topic, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

LARGEST_FRAME = 2**20
"""Bytes; control messages are small, so a longer one is an error or an attack."""

HEADER = 4


def pack(*message: Any) -> bytes:
    """A message as a frame.

    Raises:
        ValueError: it is larger than a frame may be.
    """
    body: bytes = msgpack.packb(message)
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"message {message[0]!r} has {len(body)} bytes; a frame holds {LARGEST_FRAME}")
    return len(body).to_bytes(HEADER, "big") + body


def unpack(buffer: bytearray) -> list[Any] | None:
    """Take the first message off a buffer; None if it is not there in full.

    Raises:
        ValueError: the frame is too long, or no message.
    """
    if len(buffer) < HEADER:
        return None
    end = HEADER + int.from_bytes(buffer[:HEADER], "big")
    if end - HEADER > LARGEST_FRAME:
        raise ValueError(f"a frame of {end - HEADER} bytes; {LARGEST_FRAME} are allowed")
    if len(buffer) < end:
        return None
    try:
        message = msgpack.unpackb(buffer[HEADER:end], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: unhashable keys
        raise ValueError(f"a frame that is not msgpack: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ValueError("a frame that is no message")
    del buffer[:end]
    return message


def pieces(value: Any) -> list[bytes]:
    """Plain data of any size as pieces that fit into frames."""
    body: bytes = msgpack.packb(value)
    return [body[at : at + LARGEST_FRAME // 2] for at in range(0, len(body), LARGEST_FRAME // 2)]


def whole(parts: Sequence[bytes]) -> Any:
    """The data that `pieces` took apart."""
    return msgpack.unpackb(b"".join(parts), strict_map_key=False)
