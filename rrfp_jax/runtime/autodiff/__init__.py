"""A stage's backward from its forward: traced once, cut into programs, none of which does another's work.

differentiate   a stage function -> prepare, forward, backward, and on demand input and weight gradients
    traced          a traced program and what it reads
    dataflow        which inputs each value depends on
    residuals       what the forward saves for the backward, and what it need not
    hoist           what a rematerialised backward makes of weights alone, prepared once a step
    remat           rematerialisation by name
splitbackward   one backward -> input gradient, then weight gradients
    inline          calls taken apart
    halves          what a split gives
    partition       equations dealt to the halves
    mincut          where to cut so that least is held in between
    splitscan       loops split in two
"""
