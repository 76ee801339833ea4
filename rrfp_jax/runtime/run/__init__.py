"""One process among others: how it joins a run, what it tells the others, how it leaves.

Begin with `world`.
"""
