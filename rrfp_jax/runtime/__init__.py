"""The runtime on real devices: one driver per process, which asks the core what to run.

Begin with `engine/engine`, which puts the folders together, then `engine/loop`. Only `_jax` and
`run/coordinator` use private JAX.
"""
