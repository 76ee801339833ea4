"""The scheduling core: standard library only, no clock, no input or output.

Events go in, instructions come out. The runtime and the simulator feed the same objects.
"""
