"""Messages between stages: activations, gradients, tied values.

Begin with `protocol`; a new way to send is one more file beside `socket`.
"""
