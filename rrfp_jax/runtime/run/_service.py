"""JAX's coordination service as a program of its own; `coordinator.py` starts it.

    python -P _service.py ADDRESS PROCESSES LINGER_SECONDS

It imports nothing but jaxlib, so that it is there in half a second. It writes a line once it serves. A line
on standard input ends it at once. It ignores signals that ask a run to end, because SLURM sends them to every
process of a step, and the ranks need it until they have saved. If its parent dies, it goes on for
LINGER_SECONDS. JAX aborts every process that loses the service, and before that they should be able to say
whom they lost.

Tried on jaxlib 0.10.2 and 0.12.0.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from jaxlib import _jax  # type: ignore[attr-defined]

HEARTBEAT_SECONDS = 10**6
"""Never: RRFP_SILENCE_SECONDS says after how long a silent rank is given up. After this JAX aborts all ranks,
even if it was the whole run that stood still, the service with it."""
SHUTDOWN_SECONDS = 5
POLL_SECONDS = 0.2

FOR_THE_RANKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def was_told(parent: int) -> bool:
    """Wait for a line on standard input, or the end of the process that should write it; whether it came.

    The pipe alone would not tell: whatever the parent has forked holds its other end, too.
    """
    while os.getppid() == parent:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            return bool(os.read(0, 1))
    return False


if __name__ == "__main__":
    for number in FOR_THE_RANKS:
        signal.signal(number, signal.SIG_IGN)
    started_by = os.getppid()
    service = _jax.get_distributed_runtime_service(
        sys.argv[1],
        int(sys.argv[2]),
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
        recoverable=True,
    )
    print("serving", flush=True)
    if not was_told(started_by):
        time.sleep(float(sys.argv[3]))
    os._exit(0)  # without the service's own way out, which waits for processes that may be gone
