"""The run's token: who has it is of this run. It is handed out beside the key-value store, open to all.

The launcher gives it to its ranks by their environment, which only their user may read. By hand it is a file
that only its user may read. A SLURM step has it from the environment of its job, or in such a file in the
user's own folder, which all its nodes must share.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import MutableMapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import expanded, printable
from rrfp_jax.files import OTHERS_READ, OTHERS_WRITE, open_own

NAME, FILE = "RRFP_TOKEN", "RRFP_TOKEN_FILE"

SHORTEST = 32
"""Characters: 128 bits if they are hexadecimal digits."""

POLL_SECONDS = 0.05

HOW = (
    f"(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > run.token); export {FILE}=run.token"
)
"""The commands that make one by hand."""


def new_token() -> str:
    """A token that nobody has seen."""
    return secrets.token_hex(32)


def take_token(environment: MutableMapping[str, str]) -> bytes | None:
    """The token that the environment holds, or that is in the file it names; None if it says neither.

    It is taken out of the environment, so that what this process starts does not have it. UsageError says
    that it is too short, or that the file cannot be read, or that others may read it.
    """
    if text := environment.pop(NAME, ""):
        return _checked(text, NAME)
    if path := environment.get(FILE, ""):
        return _checked(_read(expanded(FILE, path)), f"{FILE}={path}")
    return None


class SharedToken:
    """The token of a SLURM step, as a file in the user's own folder while its tasks meet."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self._path = (folder or Path.home() / ".rrfp") / f"{name}.token"

    def write(self) -> bytes:
        """Make it; one task does."""
        token = new_token()
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self.remove()  # of a run that was killed before all had met
            part = self._path.with_suffix(".part")
            part.unlink(missing_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
            part.rename(self._path)
        except OSError as error:
            raise UsageError(f"{self._path}: {error.strerror}: {_remedy()}") from None
        return token.encode()

    def read(self, seconds: float) -> bytes:
        """Wait for it; TrainingError if it does not come in time, UsageError if others may read it."""
        deadline = monotonic() + seconds
        while not self._path.exists():
            if monotonic() > deadline:
                raise TrainingError(
                    f"{self._path} has not come in {seconds:.0f} s: rank 0 writes the run's token there, so "
                    f"all nodes must share that folder; or {_remedy()}"
                )
            sleep(POLL_SECONDS)
        return _checked(_read(self._path), str(self._path))

    def remove(self) -> None:
        """Remove it, once all have it."""
        with suppress(OSError):
            self._path.unlink()


def _remedy() -> str:
    return f"give all ranks the same {NAME}, or {FILE}, before srun: {HOW}"


def _read(path: Path) -> str:
    """A file of this user that nobody else may read or write."""
    try:
        with os.fdopen(open_own(path, OTHERS_READ | OTHERS_WRITE), "rb") as file:
            return file.read(4096).decode("utf-8", "replace").strip()
    except OSError as error:
        raise UsageError(
            f"the token's file {printable(str(path))}: {error.strerror}; who has a token can take a rank's "
            f"place, so make one that is yours alone: {HOW}"
        ) from None


def _checked(text: str, where: str) -> bytes:
    if len(text) < SHORTEST:
        raise UsageError(f"{where}: a token of {len(text)} characters; at least {SHORTEST} are needed: {HOW}")
    return text.encode("utf-8", "replace")


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
    """A store in which every value is sealed by the run's token, so that nobody else can write one."""

    def __init__(self, store: Store, token: bytes) -> None:
        self._store, self._token = store, token
        self.key_value_dir_get_bytes = store.key_value_dir_get_bytes
        self.key_value_delete = store.key_value_delete

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self._store.key_value_set_bytes(key, self._seal(key, value) + value)

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """See `Store`; RuntimeError if what is there was not written by a process of this run."""
        found = self._store.blocking_key_value_get_bytes(key, timeout_in_ms)
        seal, value = found[:SEAL], found[SEAL:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise RuntimeError(f"{key} in the key-value store was not written by a process of this run")
        return value

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._token, len(key).to_bytes(4, "big") + key.encode() + value, sha256)
