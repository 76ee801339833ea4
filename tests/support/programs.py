"""Programs for tests of stored executables; as a command, says what came of them."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rrfp_jax.runtime.programs.executables import Executables

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def compilations():
    """A list to which every program adds an item that JAX compiles meanwhile."""
    compiled = []

    def note(event, seconds, **_):
        if event == COMPILED:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def lowered(device, factor=1.0):
    """A program with a large constant, which donates its first argument."""
    table = factor * np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    spec = jax.ShapeDtypeStruct((40, 40), jnp.float32, sharding=SingleDeviceSharding(device))

    def program(a, b):
        return [jnp.tanh(a @ table + b), (a * b).sum()]

    where = SingleDeviceSharding(device)
    return jax.jit(program, donate_argnums=0, keep_unused=True, out_shardings=where).lower(spec, spec)


def result(compiled, device):
    """The numbers that a program gives, and whether it took its first argument's memory."""
    a, b = (jax.device_put(np.full((40, 40), n, np.float32), device) for n in (0.1, 0.2))
    out = compiled(a, b)
    assert all(leaf.devices() == {device} for leaf in out) and a.is_deleted()
    return [float(out[0].sum()), float(out[1])]


def run(folder, **kwargs):
    """How many of the programs of two devices were compiled, lines said, results, bytes of temporaries."""
    said = []
    devices = jax.devices()[:2]
    programs = [lowered(device, factor) for device in devices for factor in (1.0, 2.0)]
    store = Executables(folder, say=said.append, **kwargs)
    where = [device for device in devices for _ in (1, 2)]
    with compilations() as fresh:
        compiled = [
            store.compiled(program, [device]) for program, device in zip(programs, where, strict=True)
        ]
    temporaries = [one.memory_analysis().temp_size_in_bytes for one in compiled]
    results = [result(one, device) for one, device in zip(compiled, where, strict=True)]
    return {"compiled": len(fresh), "said": said, "results": results, "temporaries": temporaries}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    print(json.dumps(run(Path(sys.argv[1]))))
