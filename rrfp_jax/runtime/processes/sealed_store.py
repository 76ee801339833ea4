"""The run's key-value store with values that only the run can write.

Whoever reaches the coordination service can read and write the store. What a process writes here begins with
a hash of key and value that takes the run's token, so what a stranger writes is noticed by whoever reads it.
A stranger can still read, delete, and hold up.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Protocol

SEAL = 32  # bytes


class Store(Protocol):
    """What is needed of the store's client. Calls may come from several threads, and raise RuntimeError."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Write a key that there is not."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait until there is a key, and read it; DEADLINE_EXCEEDED if there is none in time."""

    def key_value_dir_get_bytes(self, key: str) -> object:
        """Read all that is below a key."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key, or all below it."""


class SealedStore:
    """See above.

    Args:
        store: the client.
        token: of the run.
    """

    def __init__(self, store: Store, token: bytes) -> None:
        self._store, self._token = store, token

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """See `Store.key_value_set_bytes`."""
        self._store.key_value_set_bytes(key, self._seal(key, value) + value)

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """See `Store.blocking_key_value_get_bytes`.

        Raises:
            RuntimeError: what is there was not written by a process of this run.
        """
        found = self._store.blocking_key_value_get_bytes(key, timeout_in_ms)
        seal, value = found[:SEAL], found[SEAL:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise RuntimeError(f"{key} in the key-value store was not written by a process of this run")
        return value

    def key_value_dir_get_bytes(self, key: str) -> object:
        """See `Store.key_value_dir_get_bytes`; to see whether the store answers: no seal is looked at."""
        return self._store.key_value_dir_get_bytes(key)

    def key_value_delete(self, key: str) -> None:
        """See `Store.key_value_delete`."""
        self._store.key_value_delete(key)

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._token, len(key).to_bytes(4, "big") + key.encode() + value, sha256)
