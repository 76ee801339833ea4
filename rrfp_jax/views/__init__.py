"""Pictures and files made of a trace; they need the core and nothing else of ours.

Begin with `timeline`.
"""
