"""A named run from its configuration to its last line: what `rrfp train` does for a user.

Begin with `config`, then `run`.
"""
