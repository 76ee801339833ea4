"""What a run has done: its steps on disk, in pictures, explained, and in a terminal while it lives.

Begin with `explanation`, then `causes`: which cause matters most, in which words.
"""
