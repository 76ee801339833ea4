"""Environments in which runs live: what `python -m tests.verification.environments` tries.

`living.py` has the form of a case and runs one, and each `cases_*.py` has a table `CASES` of them.
"""
