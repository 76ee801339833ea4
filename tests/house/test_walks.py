"""What walks through the house count, and one of them; none is held to a number yet."""

import sys

import pytest

from rrfp_jax.core.tasks import FORWARD, Task
from tests.house import walks


def test_functions_of_the_package_are_noted_while_the_walk_is_on():
    walk, before = walks.Walk(), sys.getprofile()
    walk.listen()
    try:
        str(Task(FORWARD, 0, 1))
        walk.on = True
        str(Task(FORWARD, 0, 1))
        walk.on = False
    finally:
        walks.threading.setprofile(None)
        sys.setprofile(before)
    named = [one.partition(" ")[2] for one in walk.plain()[walks.MAIN]]
    assert named == ["Task.__str__", "Kind.letter"]


class Settings:
    def __init__(self, budget):
        self.budget, self.memory = budget, object()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (walks.BUDGET, True),
        (walks.BUDGET - 123_456, True),
        (f"--config.activation_budget={walks.BUDGET}", True),
        ([None, {"a": walks.BUDGET}], True),
        (Settings(walks.BUDGET), True),
        (Settings(Settings(walks.BUDGET)), False),
        (1, False),
        (walks.BUDGET * 2, False),
        ("another", False),
    ],
)
def test_what_is_the_budget(value, expected):
    assert walks.is_budget(value) == expected


def test_a_step_is_walked_through():
    table = walks.counts(walks.traced("step"))
    main, engine = table[walks.MAIN], table[f"{walks.MAIN}, engine"]
    assert 5 < engine["files"] < main["files"] and 30 < engine["functions"] < main["functions"]
    assert table[walks.ALL]["functions"] >= main["functions"]
