"""A virtual stage's compiled programs, one set per shape bucket, and how they are made, stored and found.

Begin with `stage_programs`, then `library`.
"""
