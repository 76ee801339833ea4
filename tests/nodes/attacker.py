"""What strangers on another node do to a run, without its token; they stay connected until their input ends.

python -m tests.nodes.attacker HOST COORDINATOR PORT

At a rank's port they do whatever `tests/attacks` does on one machine. At the coordinator's a client of JAX
joins as rank 1, and once the ranks have read their addresses overwrites and deletes these.
"""

import sys
from contextlib import ExitStack

from jaxlib import _jax

from rrfp_jax.runtime.run.token import SEAL
from tests.attacks.test_run import attack

MILLISECONDS = 60_000
KEYS = ["rrfp/address/0", "rrfp/address/1"]


def main(host, coordinator, port):
    client = _jax.get_distributed_runtime_client(
        f"{host}:{coordinator}", 1, init_timeout=60, shutdown_on_destruction=False
    )
    client.connect()
    sealed, _ = [client.blocking_key_value_get_bytes(key, MILLISECONDS) for key in KEYS]
    with ExitStack() as stack:
        attack((host, int(port)), stack)
        client.key_value_set_bytes(KEYS[0], sealed[:SEAL] + b"10.77.0.12 7000", allow_overwrite=True)
        assert client.blocking_key_value_get_bytes(KEYS[0], MILLISECONDS).endswith(b"7000")
        for key in KEYS:
            client.key_value_delete(key)
        print("done", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
