"""Which device of which process belongs to which stage, tensor shard and replica.

Begin with `topology`.
"""
