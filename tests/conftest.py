"""Four virtual CPU devices for every test; set before JAX makes its backend."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
