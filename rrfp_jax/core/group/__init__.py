"""Several processes that share a stage dispatch one order: by a leader, or by unanimous votes.

Begin with `group`, which has the theory.
"""
