"""What a run will cost before it runs: operations, bytes, seconds and the split of layers they suggest.

Begin with `forecast`.
"""
