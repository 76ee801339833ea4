"""One process of several that test the transports between them: a JSON line for each scenario."""

import json
import os
import sys
import time
import traceback

import jax

from rrfp_jax.runtime.run.join import join
from rrfp_jax.runtime.transport import protocol as transport
from rrfp_jax.runtime.transport.choice import between_processes
from rrfp_jax.runtime.transport.mailed import MailedTransport
from tests.support import transport_conformance as conformance


def ends_of(name, world):
    """This process's ends of a transport, made as for a run."""
    owners = conformance.OWNERS[name]
    own = [stage for stage, rank in enumerate(owners) if rank == world.rank]
    devices = dict(zip(own, jax.local_devices(), strict=False))
    owned = {stage: (device,) for stage, device in devices.items()}
    ends = transport.Endpoints(world, [[rank] for rank in owners], owned, [1 - world.rank])
    made = between_processes("nixl" if name == "NixlTransport" else "socket", ends).transport
    made = MailedTransport(ends, made) if name == "MailedTransport" else made
    assert type(made).__name__ == name
    return conformance.Ends(made, devices, owners, world)


def main():
    """One process of several: run the scenarios that are wanted, print a line for each."""
    wanted = json.loads(os.environ["TEST_CASES"])
    jax.config.update("jax_num_cpu_devices", 2)
    world = join()
    made = {
        name: ends_of(name, world) for name in conformance.OWNERS
    }  # together, as two trainers have theirs
    for name, ends in made.items():
        for scenario in conformance.BETWEEN[name]:
            if [name, scenario.__name__] not in wanted:
                continue
            began, error = time.perf_counter(), None
            try:
                scenario(ends)
            except Exception:
                error = traceback.format_exc()
            line = {"transport": name, "scenario": scenario.__name__, "error": error}
            print(json.dumps(line | {"seconds": time.perf_counter() - began}), flush=True)
            if error:  # the other process waits: it will hear of it
                sys.exit(1)


if __name__ == "__main__":
    main()
