"""The scheduling core: events go in, instructions come out. No clock, no input or output, no JAX.

Begin with `tasks`, `events` and `step_rules`, then `progress`, which has the rules, then `scheduler`.
"""
