"""One process among others: its place, its connections and clock, and its limits on waiting.

Begin with `world`.
"""
