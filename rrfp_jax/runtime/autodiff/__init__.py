"""A stage's backward from its forward: traced once, then cut into programs that repeat no work of each other.

differentiate   a stage function -> prepare, forward, backward, and on demand input and weight gradients
residuals       what the forward saves for the backward, what is prepared once a step, rematerialisation
split_backward  one backward -> input gradient, then weight gradients
traced          traced programs: what they read, on which inputs each value depends, calls taken apart
"""
