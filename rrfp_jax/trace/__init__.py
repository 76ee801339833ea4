"""Recorded steps, and the costs that steps take.

Begin with `records` (what happened) and `costs` (what is assumed).
"""
