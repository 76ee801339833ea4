"""The rules of a stage's tasks, as tables: the code follows them, and core/README.md shows them.

A virtual stage has for each microbatch the tasks F and B, or F, I and W. Each goes through three states:

    WAITING -> READY -> DISPATCHED

There is no state for "ended": a device runs its programs in order, so that a predecessor on the same stage
need only be dispatched. Everything else in the core decides *which* of the ready tasks is dispatched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from rrfp_jax.core.tasks import BACKWARD, FLOW, FORWARD, INPUT, WEIGHT, Kind

WAITING, READY, DISPATCHED = range(3)

STATES = ("waiting", "ready", "dispatched")


class Cause(Enum):
    """What moves a task from one state to the next."""

    BEGINNING = "the step begins"
    ARRIVAL = "its input arrives"
    PREDECESSOR = "its predecessor is dispatched"
    CHOICE = "the schedule chooses it"


TRANSITIONS: Mapping[Cause, tuple[int, int]] = MappingProxyType(
    {
        Cause.BEGINNING: (WAITING, READY),
        Cause.ARRIVAL: (WAITING, READY),
        Cause.PREDECESSOR: (WAITING, READY),
        Cause.CHOICE: (READY, DISPATCHED),
    }
)
"""From which state to which. An arrival in any other state is illegal. `Chosen` for a task that was
dispatched is illegal, too; for a waiting task it does nothing and must be told again."""


class Rule(NamedTuple):
    """What holds for the tasks of a kind.

    Attributes:
        predecessor: the task of the same virtual stage and microbatch that is dispatched before it.
        admitted: whether it leaves something for later tasks, for which admission must have room.
        adds: whether it makes a gradient of the weights, which needs a place until it is added. After it,
            nothing is left of its chunk's microbatch, and what admission charged for that is freed.
    """

    predecessor: Kind | None
    admitted: bool
    adds: bool


RULES: Mapping[Kind, Rule] = MappingProxyType(
    {
        FORWARD: Rule(predecessor=None, admitted=True, adds=False),
        BACKWARD: Rule(predecessor=FORWARD, admitted=False, adds=True),
        INPUT: Rule(predecessor=FORWARD, admitted=False, adds=False),
        WEIGHT: Rule(predecessor=INPUT, admitted=False, adds=True),
    }
)

ADMITTED = tuple(RULES[kind].admitted for kind in Kind)
ADDS = tuple(RULES[kind].adds for kind in Kind)
"""The same by kind, for the dispatch loop."""

FUSED, SPLIT, FORWARD_ONLY = (FORWARD, BACKWARD), (FORWARD, INPUT, WEIGHT), (FORWARD,)
"""The tasks of a virtual stage for one microbatch, whichever way its backward runs, if there is one."""


def cause(kind: Kind, arrives: bool) -> Cause:
    """What makes a task ready.

    Where its input comes from another virtual stage, that always arrives last: a gradient exists only after
    the forward of its own microbatch.

    Args:
        kind: of the task.
        arrives: whether its input comes from another virtual stage: F but for the first one of the model, B
            and I but for the last one.
    """
    if arrives:
        return Cause.ARRIVAL
    return Cause.BEGINNING if RULES[kind].predecessor is None else Cause.PREDECESSOR


class Refusal(Enum):
    """What was expected instead of an arrival that is illegal, in the order in which it is checked."""

    ELSEWHERE = "F, B or I whose input comes from another virtual stage"
    ONCE = "each input once"
    EARLY = "a gradient only after the microbatch's own forward"
    NO_BACKWARD = "no gradient in a forward-only pass"


def in_markdown() -> str:
    """The tables and a drawing of the states, for core/README.md."""
    return "\n\n".join((_drawing(), _by_kind(), _readiness(), _arrivals()))


def _drawing() -> str:
    moves: dict[tuple[int, int], list[str]] = {}
    for name, move in TRANSITIONS.items():
        moves.setdefault(move, []).append(name.value)
    width = max(map(len, STATES))
    lines = [
        f"{STATES[a]:{width}} --> {STATES[b]:{width}}  {', or '.join(why)}" for (a, b), why in moves.items()
    ]
    return "\n".join(("```text", *lines, "```"))


def _by_kind() -> str:
    places = {1: "v + 1", -1: "v - 1", 0: "nobody"}
    rows = [
        (
            kind.letter,
            "nothing" if rule.predecessor is None else rule.predecessor.letter,
            places[-FLOW[kind]],
            places[FLOW[kind]],
            _permission(rule),
            "yes" if rule.adds else "no",
        )
        for kind, rule in RULES.items()
    ]
    heads = (
        "task of v",
        "after",
        "input from",
        "output to",
        "once ready, may run if",
        "ends its chunk's charge (charged whole: the microbatch's, if the last)",
    )
    return _table(heads, rows)


def _permission(rule: Rule) -> str:
    if rule.admitted:
        return "it is admitted"
    return "there is a place for its gradient" if rule.adds else "always"


def _readiness() -> str:
    rows = []
    for kind in Kind:
        own, why = RULES[kind].predecessor, cause(kind, arrives=False).value
        why = why if own is None else f"its own {own.letter} is dispatched"
        end = {1: "on the first virtual stage", -1: "on the last virtual stage", 0: "everywhere"}[FLOW[kind]]
        rows.append((kind.letter, end, why))
        if FLOW[kind]:
            rows.append((kind.letter, "elsewhere", cause(kind, arrives=True).value))
    return _table(("task", "where", "is ready when"), rows)


def _arrivals() -> str:
    return _table(("an arrival is illegal unless it keeps to",), [(refusal.value,) for refusal in Refusal])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
