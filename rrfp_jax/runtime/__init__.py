"""The runtime on real devices: one driver per process, which asks the core what to run.

Begin with `engine`, which puts the rooms together, then `driver/driver`. Only `_jax` uses private JAX.
"""
