"""Bytes on a stage, without devices: what a microbatch takes when (`footprint`), and so far (`meter`).

Begin with `footprint`.
"""
