"""The key-value store, which whoever reaches the coordination service may read and write."""

import time

import pytest

from rrfp_jax.errors import TrainingError
from rrfp_jax.runtime.run.consensus import StoreCarrier
from rrfp_jax.runtime.run.mailbox import encoded
from rrfp_jax.runtime.run.token import SEAL, SealedStore

TOKEN, OTHER = b"token of the run", b"another token"


class Bare:
    """A key-value store as a stranger sees it."""

    def __init__(self):
        self.keys = {}

    def key_value_set_bytes(self, key, value):
        self.keys[key] = value

    def blocking_key_value_get_bytes(self, key, timeout_in_ms):
        deadline = time.monotonic() + timeout_in_ms / 1000
        while key not in self.keys:
            if time.monotonic() > deadline:
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            time.sleep(0.01)
        return self.keys[key]

    def key_value_dir_get_bytes(self, key):
        return []

    def key_value_delete(self, key):
        self.keys.pop(key, None)


def test_what_the_run_writes_it_reads():
    store = SealedStore(Bare(), TOKEN)
    store.key_value_set_bytes("rrfp/address/0", b"10.0.0.1 7000")
    assert store.blocking_key_value_get_bytes("rrfp/address/0", 10) == b"10.0.0.1 7000"


@pytest.mark.parametrize(
    "forge",
    [
        lambda bare: b"10.6.6.6 7000",
        lambda bare: b"",
        lambda bare: bytes(SEAL) + b"10.6.6.6 7000",
        lambda bare: bare.keys["rrfp/address/1"],  # sealed, but for another key
        lambda bare: bare.keys["rrfp/address/0"][:SEAL] + b"10.6.6.6 7000",
        lambda bare: bare.keys["rrfp/address/0"] + b"0",
        lambda bare: bare.keys["other"],
    ],
)
def test_what_a_stranger_writes_is_refused(forge):
    bare = Bare()
    store = SealedStore(bare, TOKEN)
    for rank in range(2):
        store.key_value_set_bytes(f"rrfp/address/{rank}", b"10.0.0.1 7000")
    SealedStore(bare, OTHER).key_value_set_bytes("rrfp/address/0", b"10.6.6.6 7000")
    bare.keys["other"] = bare.keys["rrfp/address/0"]
    store.key_value_set_bytes("rrfp/address/0", b"10.0.0.1 7000")
    bare.keys["rrfp/address/0"] = forge(bare)
    with pytest.raises(RuntimeError, match="rrfp/address/0 in the key-value store was not written by"):
        store.blocking_key_value_get_bytes("rrfp/address/0", 10)


def test_a_forged_decision_ends_the_run_by_name_and_is_not_decoded():
    bare = Bare()
    bare.keys["rrfp/n/0/0/0"] = bytes(SEAL) + encoded([[1, 0.0, 1, [0, [0, 0, 0]]]])
    carrier = StoreCarrier(SealedStore(bare, TOKEN), "n", 1, [0], lambda: None, 5.0)
    with carrier, pytest.raises(TrainingError, match="was not written by a process of this run"):
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            assert carrier.poll() == []
            time.sleep(0.01)
    carrier.leave()
