"""The Trainer: steps, checks against plain JAX, reports.

Begin with `trainer`, then `stepping`.
"""
