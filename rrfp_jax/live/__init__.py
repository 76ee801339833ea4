"""A run looked at while it lives: what it writes for that, what is read, and what a terminal shows.

Begin with `step_file.py`. Whoever looks does the computing; the run only copies bytes.
"""
