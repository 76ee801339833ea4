"""The parts of `benchmarks.gpu_check`, one file each, and what runs them.

Only JAX, flax, optax, NumPy, what these need, `rrfp_jax`, `models` and `configs` may be imported here: a GPU
machine may have no network, and nothing can be installed on it then.
"""
