"""From device to device, one-sidedly: the receiver gives a place, and the sender writes into it.

Begin with `messages`: what two processes say to one another. `receiver` and `sender` are the machines of both
ends; like the scheduling core they know no clock, no socket and no device.
"""
