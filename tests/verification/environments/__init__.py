"""Environments in which runs live: what `python -m tests.verification.environments` tries.

`case.py` has the form of a case, `living.py` runs one, and each `cases_*.py` has a table `CASES` of them.
"""
