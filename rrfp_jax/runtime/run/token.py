"""The run's token: who has it is of this run. It is handed out beside the key-value store, open to all.

The launcher gives it to its ranks by their environment, which only their user may read. By hand it is a file
that only its user may read. A SLURM step has it from the environment of its job, or in such a file in the
user's own folder, which all its nodes must share.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import MutableMapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from rrfp_jax.errors import TrainingError, UsageError
from rrfp_jax.fields import expanded, printable
from rrfp_jax.files import OTHERS_READ, OTHERS_WRITE, is_seen, open_own

NAME, FILE = "RRFP_TOKEN", "RRFP_TOKEN_FILE"

SHORTEST = 32
"""Characters: 128 bits if they are hexadecimal digits."""

READ = "rrfp/token"
"""Keys below which ranks say that they have a token; its value is in no key."""

HOW = (
    f"(umask 077; head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \\n' > run.token); export {FILE}=run.token"
)
"""The commands that make one by hand."""

NO_TOKEN = f"no token says who is of this run: on every rank set {FILE} to the same: {HOW}"
REMEDY = f"give all ranks the same {NAME}, or {FILE}, before srun: {HOW}"


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


def shared_token(path: Path, store: Any, rank: int, size: int, seconds: float) -> bytes:
    """The token of a SLURM step, that rank 0 makes, once all have it; all call this together.

    Until then it is in a file of the user's own. `store` is JAX's client, as nothing can be sealed yet.
    UsageError says which nodes do not see rank 0's file, or that others may read it.
    """
    limit = int(1000 * seconds)
    try:
        if rank == 0:
            token, seen = write_token(path), ""
        else:
            store.blocking_key_value_get_bytes(f"{READ}/0", limit)  # it is written by now
            token = _checked(_read(path), str(path)) if is_seen(path) else b""
            seen = "" if token else socket.gethostname()
        store.key_value_set_bytes(f"{READ}/{rank}", f"-{seen}".encode())
        said = [store.blocking_key_value_get_bytes(f"{READ}/{r}", limit) for r in range(size)]
    except RuntimeError as error:
        raise TrainingError(
            f"not all ranks have said in {seconds:.0f} s whether they see {path}: {error}"
        ) from None
    finally:
        if rank == 0:
            with suppress(OSError):
                path.unlink()
    blind = {text: None for own in said if (text := printable(own.decode(errors="replace")[1:64]))}
    if blind:
        raise UsageError(
            f"{path}: rank 0 writes the run's token there, but {', '.join(blind)} has another such folder: "
            f"{REMEDY}"
        )
    return token


def write_token(path: Path) -> bytes:
    """Make a token in a file, in place of one that a killed run has left."""
    token = new_token()
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token)
        part.rename(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: {REMEDY}") from None
    return token.encode()


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


class SealedStore:
    """The key-value store by JAX's client, with every value sealed by the token: nobody else can write one.

    Calls may come from several threads, and raise RuntimeError.
    """

    def __init__(self, store: Any, token: bytes) -> None:
        self._store, self._token = store, token
        self.key_value_dir_get_bytes = store.key_value_dir_get_bytes  # all that is below a key
        self.key_value_delete = store.key_value_delete  # a key, or all below it

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Write a key that there is not."""
        self._store.key_value_set_bytes(key, self._seal(key, value) + value)

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Wait until there is a key, and read it; DEADLINE_EXCEEDED if there is none in time.

        RuntimeError if what is there was not written by a process of this run.
        """
        found: bytes = self._store.blocking_key_value_get_bytes(key, timeout_in_ms)
        seal, value = found[:SEAL], found[SEAL:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise RuntimeError(f"{key} in the key-value store was not written by a process of this run")
        return value

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._token, len(key).to_bytes(4, "big") + key.encode() + value, sha256)
