"""The simulator: the scheduling core on virtual time. Standard library only.

It feeds the same `StageScheduler` as the runtime does, so the two cannot disagree about a rule.
"""
