"""The cases that are explored: what small senders can send, and what can go wrong."""

from __future__ import annotations

from tests.verification.exploration.slots.world import Case

SMALL = [
    Case(sends=[[[1, 1, 1]]]),
    Case(sends=[[[1, 2], [1]]]),
    Case(sends=[[[1, 0]], [[2]]]),
    Case(sends=[[[1]], [[1]]], deaths=True),
    Case(sends=[[[1], [1]]], resets=True),
]
"""A second or so each; they have everything that there is."""

LARGE = [
    Case(sends=[[[1, 2, 1, 2]]], slots=3, ahead=2),
    Case(sends=[[[], [1, 1]], [[1], []]]),
    Case(sends=[[[1, 1], []], [[], [1]]], ahead=2),
    Case(sends=[[[1, 1], [1]]], resets=True),
    Case(sends=[[[1]], [[1]]], resets=True),
    Case(sends=[[[1], [1]]], resets=True, deaths=True),
    Case(sends=[[[1]], [[1, 1]]], deaths=True),
    Case(sends=[[[1, 2]], [[2, 1]]]),
    Case(sends=[[[1], [1]], [[1], [1]]]),
    Case(sends=[[[1, 1], [1, 1]]], slots=3, ahead=2, deaths=True),
    Case(sends=[[[2, 1], [1, 2]]], resets=True),
    Case(sends=[[[1, 0, 1]], [[1]], [[1]]], slots=3),
    Case(sends=[[[1, 1]], [[1, 1]]], slots=4, ahead=2, deaths=True),
    Case(sends=[[[1], [1]], [[1], [1]]], resets=True),
]
"""From seconds to minutes; the smallest first."""
