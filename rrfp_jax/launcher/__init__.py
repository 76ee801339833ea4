"""Starts the processes of a run, watches them and says whose fault it was; knows nothing of training.

Begin with `spawn`, then `supervisor`.
"""
