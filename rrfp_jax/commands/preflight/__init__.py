"""What `rrfp doctor` looks at before a run.

Begin with `findings`.
"""
