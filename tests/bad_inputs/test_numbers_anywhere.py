"""Odd numbers in every field and argument that takes a number: accepted, or refused with the value.

The fields are found by their annotations, so new ones are covered without a line here.
"""

import dataclasses
import inspect
import math
import signal
import time
import typing

import numpy as np
import pytest

import rrfp_jax as rrfp
from configs.quickstart import get_config
from rrfp_jax.fields import shown
from tests.bad_inputs import namespace

ODD = (
    *(0, -1, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 10**15, 10**400, -(10**400), True, "1"),
    *(np.int64(0), np.int8(-1), np.uint64(2**64 - 1), np.float32("nan"), np.float64("inf"), np.float16(0.5)),
    *(np.bool_(True), np.array(1), np.array([1, 2]), 1j, (), (0,), (math.nan,), (10**400,)),
)
SECONDS, LIMIT_SECONDS = 1.0, 20
"""Of the processor for one value; of the clock for all values of a field."""


def parts(hint):
    """A type, and those that it is made of."""
    yield hint
    for part in typing.get_args(hint):
        yield from parts(part)


def numeric(hints):
    """The names whose type has a number somewhere."""
    return [name for name, hint in hints.items() if {int, float} & set(filter(callable, parts(hint)))]


def settings_in(hints):
    """The dataclasses in some types, and in their fields, that can be made without arguments."""
    found = {}
    for part in (part for hint in hints.values() for part in parts(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            own = typing.get_type_hints(part)
            bound = [item for item in dataclasses.fields(part) if item.init]
            if all(item.default is not item.default_factory for item in bound):
                found |= {part.__name__: (part, own)} | settings_in(own)
    return found


def owners():
    """By name: what makes it, given some fields, and the types of all fields."""
    config = {
        item.name: typing.get_type_hints(type(get_config()))[item.name]
        for item in dataclasses.fields(get_config())
    }
    trainer = typing.get_type_hints(rrfp.Trainer.__init__)
    trainer = {name: trainer[name] for name in inspect.signature(rrfp.Trainer).parameters}
    nested = settings_in(config | trainer)
    return {"RunConfig": (namespace.q, config), "Trainer": (namespace.trainer, trainer)} | nested


OWNERS = owners()
FIELDS = [(owner, name) for owner, (_, hints) in OWNERS.items() for name in numeric(hints)]


def trouble(make, name, value):
    """What is wrong with the answer to a value; None if it is accepted, or refused as it should be."""
    began = time.process_time()
    try:
        make(**{name: value})
    except ValueError as refused:  # `UsageError`, and what the simulator raises
        if not any(shown(told)[:100] in str(refused) for told in ways_to_tell(value)):
            return f"the value is not in: {refused}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    spent = time.process_time() - began
    return None if spent < SECONDS else f"took {spent:.1f} s"


def ways_to_tell(value):
    """What a sentence may begin to tell of a value: itself, a list, one of several, a plain number."""
    plain = value.item() if isinstance(value, np.generic) else value
    return [value, plain, *([list(value), *value] if isinstance(value, tuple) else [])]


@pytest.fixture
def limited():
    """A limit that no loop outlasts."""
    usual = signal.signal(signal.SIGALRM, lambda *signal: pytest.fail("it has no end"))
    signal.alarm(LIMIT_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.parametrize(("owner", "name"), FIELDS)
def test_an_odd_number_is_accepted_or_refused_with_the_value(limited, owner, name):
    make = OWNERS[owner][0]
    wrong = {shown(value): said for value in ODD if (said := trouble(make, name, value))}
    assert not wrong, "\n".join(f"{owner}({name}={value}): {said}" for value, said in wrong.items())


def test_all_numbers_are_found():
    found = {owner: {name for own, name in FIELDS if own == owner} for owner in OWNERS}
    assert found["Mesh"] >= {"pp", "tp", "dp", "chunks"}
    assert found["Trainer"] >= {"clip_norm", "seed"}
    assert found["Settings"] >= {"clip_norm", "seed", "max_in_flight", "spare_gradients", "stall_seconds"}
    assert found["Delays"] >= {"link_bandwidth"}
    assert found["RunConfig"] >= {"steps", "split", "stall_seconds", "clip_norm"}
    assert {"Checkpointing", "Delays", "LossScale"} <= set(OWNERS)


def test_an_odd_answer_is_noticed():
    def without_the_value(number):
        raise rrfp.UsageError("no")

    assert trouble(lambda number: 1 / number, "number", 0) == "ZeroDivisionError: division by zero"
    assert trouble(without_the_value, "number", 3) == "the value is not in: no"
    assert trouble(lambda number: None, "number", 3) is None
