"""The runtime on real devices: one driver a process, which asks the core what to run.

Begin with `engine`, which puts the rooms together, then `driver/driver`. `_jax` alone uses private JAX.
"""
