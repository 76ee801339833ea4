"""The runtime on real devices: one driver per process, which asks the core what to run.

Begin with `engine`, which puts the folders together, then `driver/driver`. Only `_jax` uses private JAX.
"""
