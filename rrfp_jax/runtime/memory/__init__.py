"""Bytes of a stage: counted from compiled programs, held against a budget.

Begin with `ledger`.
"""
