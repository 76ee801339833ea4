"""A stage's backward from its forward: traced once, then cut into programs that repeat no work of each other.

differentiate   a stage function -> prepare, forward, backward, and on demand input and weight gradients
    traced          a traced program and what it reads
    dataflow        which inputs each value depends on
    residuals       what the forward saves for the backward, and what it need not
    hoist           what a rematerialised backward computes from weights alone, prepared once a step
    remat           rematerialisation by name
split_backward  one backward -> input gradient, then weight gradients
    inline          calls taken apart
    halves          what a split gives
    partition       equations dealt to the halves
    mincut          where to cut so that least is held in between
    split_scan      loops split in two
"""
