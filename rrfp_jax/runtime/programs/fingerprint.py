"""Hashes of traced programs, equal in all processes that trace the same."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from rrfp_jax.fields import without_addresses
from rrfp_jax.random_keys import is_key
from rrfp_jax.runtime.autodiff.traced import without_prints
from rrfp_jax.runtime.programs.equality import LARGEST_BYTES


def fingerprint(*programs: ClosedJaxpr) -> str:
    """A hash of programs and the values that they hold, of large ones only of their shape.

    A backward that `jax.custom_vjp` gives is known by its name only: it is not traced yet.
    """
    found = blake2b(digest_size=8)
    with jax.transfer_guard_device_to_host("allow"):
        for closed in programs:
            found.update(without_addresses(str(without_prints(closed).jaxpr)).encode())
            for value in closed.consts:
                if _is_small(value):
                    found.update(np.asarray(value).tobytes())
    return found.hexdigest()


def _is_small(value: Any) -> bool:
    is_array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and not is_key(value) and value.nbytes <= LARGEST_BYTES
