"""The scheduling core: events go in, instructions come out. No clock, no input or output, no JAX.

README.md has the reading order, the rules as tables, and what is proved of them.
"""
