"""Checkpoints on disk: complete or invisible, each process writes its own part, plain orbax reads them.

Begin with `saving`, then `folder`.
"""
