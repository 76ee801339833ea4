"""Checkpoints on disk: complete or invisible, each process writes its own part, plain orbax reads them.

Begin with `saving`; `folder` makes a checkpoint valid, in `commit`.
"""
