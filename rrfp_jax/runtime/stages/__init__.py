"""A stage at work: its arrays, gradient sums, optimizer, replicas and tied parameters.

Begin with `stage`.
"""
