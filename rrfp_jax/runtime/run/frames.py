"""Frames: four bytes of length, then [kind, channel, [field, ...]] in msgpack.

A kind of message is a class: its fields with their types are all that has to be said of it. What comes with
other fields is refused where it is read, before anybody acts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

LARGEST_FRAME = 2**20
"""Bytes; control messages are small, so a longer one is an error or an attack."""

HEADER = 4


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message between processes; every kind is a subclass, and goes by its name."""


class Frame(NamedTuple):
    """A message that has come and not been decoded yet."""

    kind: str
    channel: int
    body: msgspec.Raw


def _plain(value: Any) -> Any:
    """NumPy's scalars are plain data, too."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no plain data")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_frames = msgspec.msgpack.Decoder(Frame)


def pack(message: Message, channel: int = 0) -> bytes:
    """A message as a frame.

    Raises:
        ValueError: it is larger than a frame may be.
    """
    kind = type(message).__name__
    body = _encoder.encode((kind, channel, message))
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"a message {kind} of {len(body)} bytes; a frame holds {LARGEST_FRAME}")
    return len(body).to_bytes(HEADER, "big") + body


def unpack(buffer: bytearray) -> Frame | None:
    """Take the first frame off a buffer; None if it is not there in full.

    Raises:
        ValueError: the frame is too long, or holds no message.
    """
    if len(buffer) < HEADER:
        return None
    end = HEADER + int.from_bytes(buffer[:HEADER], "big")
    if end - HEADER > LARGEST_FRAME:
        raise ValueError(f"a frame of {end - HEADER} bytes; {LARGEST_FRAME} are allowed")
    if len(buffer) < end:
        return None
    try:
        frame = _frames.decode(buffer[HEADER:end])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a frame that is no message: {error}") from None
    del buffer[:end]
    return frame


def encoded(value: Any) -> bytes:
    """Plain data of any size."""
    return _encoder.encode(value)


def pieces(value: Any) -> list[bytes]:
    """Plain data of any size as pieces that fit into frames."""
    body = encoded(value)
    return [body[at : at + LARGEST_FRAME // 2] for at in range(0, len(body), LARGEST_FRAME // 2)]


def whole(parts: Sequence[bytes]) -> Any:
    """The data that `pieces` took apart."""
    return msgspec.msgpack.decode(b"".join(parts))
