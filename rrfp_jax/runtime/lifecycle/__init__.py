"""How a process joins a run, notices that others are gone, and leaves.

Begin with `join`, then `farewell` and `failure`.
"""
