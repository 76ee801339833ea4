"""Bytes on a stage, without devices: what microbatches may take (`footprint`), and what they take (`meter`).

Begin with `footprint`.
"""
