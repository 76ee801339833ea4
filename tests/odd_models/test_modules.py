"""Modules of flax: each thing that one keeps, each transform around it, and compositions at random."""

import pytest

from tests.odd_models.modules import KINDS, Modules, model
from tests.odd_models.odd import ALL, differs

COUNT = 300


def cases():
    for kind, (keeps, within) in KINDS.items():
        ways, first = sorted(within), sorted(keeps)[0]
        for i, name in enumerate(keeps):
            yield f"{kind}: {name}", [(kind, name, ("nothing",)), (kind, name, (ways[i % len(ways)],))]
        for name in within:
            yield f"{kind}: {name}", [(kind, first, (name,)), (kind, "dropout", (name,))]


CASES = dict(cases())
SOME = list(CASES) if ALL else list(CASES)[::4]


@pytest.mark.parametrize("name", SOME)
def test_like_plain_flax(name):
    number = list(CASES).index(name)
    differs(Modules.of(CASES[name]), (2, 1)[number % 2], schedules=("bf", "bfw")[number % 2 :][:1])


@pytest.mark.slow(reason="7 s each; test_like_plain_flax has the modules one by one")
@pytest.mark.parametrize("number", range(COUNT) if ALL else range(0, COUNT, 100))
def test_compositions_like_plain_flax(number):
    schedules = ("bf", "bfw")[number % 2 :][:1]
    differs(model(number), (1, 2, 4)[number % 3], ("none", "full")[number // 3 % 2], schedules)
