"""A rank of two that train for as long as they may: arguments TRANSPORT RETRIES FILE.

RETRIES: "kernel" as the kernel can, "doubling" as kernels before Linux 6.15. Rank 0 appends the time of each
step's end to FILE.
"""

import sys
import time

import rrfp_jax as rrfp
from rrfp_jax.runtime.run import coordinator
from tests.support import toy
from tests.support.no_mail import by_transport

UNKNOWN_OPTION = 9999


def main(transport, retries, file):
    """Train."""
    by_transport()
    if retries == "doubling":
        coordinator.TCP_RTO_MAX_MS = UNKNOWN_OPTION
    trainer = toy.trainer(
        mesh=rrfp.Mesh(pp=2), transport=transport, data=lambda step: toy.microbatches(2, seed=step)
    )
    with open(file, "a", buffering=1) as steps:
        for _ in trainer.steps(10**6):
            if trainer.is_main:
                print(time.time(), file=steps)
            time.sleep(0.2)


if __name__ == "__main__":
    main(*sys.argv[1:])
