"""A pipeline on this process's devices: puts the folders of the runtime together, and runs steps on them.

Begin with `engine`.
"""
