"""Programs for tests of stored executables."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rrfp_jax.runtime.executables import Executables

COMPILED = "/jax/core/compile/backend_compile_duration"


def lowered(device, factor=1.0):
    """A program with a large constant, which donates its first argument."""
    table = factor * np.random.default_rng(0).standard_normal((40, 40)).astype(np.float32)
    spec = jax.ShapeDtypeStruct((40, 40), jnp.float32, sharding=SingleDeviceSharding(device))

    def program(a, b):
        return [jnp.tanh(a @ table + b), (a * b).sum()]

    where = SingleDeviceSharding(device)
    return jax.jit(program, donate_argnums=0, out_shardings=where).lower(spec, spec)


def result(compiled, device):
    """The numbers that a program gives, and whether it took its first argument's memory."""
    a, b = (jax.device_put(np.full((40, 40), n, np.float32), device) for n in (0.1, 0.2))
    out = compiled(a, b)
    assert all(leaf.devices() == {device} for leaf in out) and a.is_deleted()
    return [float(out[0].sum()), float(out[1])]


def run(folder, **kwargs):
    """(programs compiled, lines said, results, bytes of temporaries) for two devices."""
    compiles, said = [], []

    def count(event, seconds, **_):
        if event == COMPILED:
            compiles.append(event)

    devices = jax.devices()[:2]
    programs = [lowered(device, factor) for device in devices for factor in (1.0, 2.0)]
    jax.monitoring.register_event_duration_secs_listener(count)
    store = Executables(folder, say=said.append, **kwargs)
    where = [device for device in devices for _ in (1, 2)]
    compiled = [store.compiled(program, device) for program, device in zip(programs, where, strict=True)]
    count_now = len(compiles)
    temporaries = [one.memory_analysis().temp_size_in_bytes for one in compiled]
    results = [result(one, device) for one, device in zip(compiled, where, strict=True)]
    jax.monitoring.unregister_event_duration_listener(count)
    return {"compiled": count_now, "said": said, "results": results, "temporaries": temporaries}
