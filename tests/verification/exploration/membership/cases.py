"""What `make test` explores, and what the command goes on to."""

from __future__ import annotations

from tests.verification.exploration.membership.world import Case

SMALL = (
    Case(2),
    Case(2, ("kill",), leaves=True, host=True),
    Case(2, ("fail",), leaves=True),
    Case(2, ("freeze", "thaw")),
    Case(2, ("cut",)),
    Case(2, ("stop",), leaves=True),
)
"""Whole in a few seconds together."""

LARGE = (
    Case(2, ("freeze", "thaw", "kill"), leaves=True, host=True),
    Case(2, ("freeze", "thaw", "stop"), leaves=True),
    Case(2, ("freeze", "thaw", "fail"), leaves=True),
    Case(3),
    Case(3, ("stop",)),
    Case(3, ("kill",)),
    Case(3, ("fail",)),
    Case(3, leaves=True, host=True),
    Case(3, ("kill",), leaves=True, host=True),
    Case(3, ("kill", "kill")),
    Case(3, ("kill", "fail")),
    Case(3, ("cut",)),
    Case(3, ("freeze", "thaw")),
    Case(3, ("freeze", "thaw", "kill"), leaves=True, host=True),
)
