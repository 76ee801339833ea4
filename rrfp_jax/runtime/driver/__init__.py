"""The loop that feeds a stage's device: events to the core, its instructions to the device.

Begin with `driver`; `device` is the queue of what was dispatched.
"""
