"""Messages between processes written from device to device, one-sidedly, by NIXL over UCX.

Begin with `sender` for how the ends work together, with `transport` for what runs them.
"""
