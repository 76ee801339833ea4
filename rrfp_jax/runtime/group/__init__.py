"""The core's group agreements between real processes: who hears what, by which carrier.

Begin with `agreement`.
"""
