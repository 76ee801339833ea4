"""Starts the processes of a run, watches them, and says which one failed. Knows nothing of training.

Begin with `spawn`, then `supervisor`.
"""
