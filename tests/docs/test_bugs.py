"""tests/verification/bugs.md is the table of mutants, and names what there is."""

import pkgutil
import re
from collections import Counter
from functools import cached_property

import pytest

from tests.docs.pages import text_of
from tests.docs.test_claims import those_in
from tests.verification.mutants import FEWEST
from tests.verification.mutation.table import MAKERS, PAGE, mutants

MUTANTS = mutants()


def test_the_page_has_a_row_for_every_mutant_and_counts_the_published_ones():
    text = text_of(PAGE)
    assert len(re.findall(r"^\| (?!the bug)", text, re.MULTILINE)) == len(MUTANTS)
    assert {mutant.id for mutant in MUTANTS} == MAKERS.keys()
    assert f"\n{sum(bool(mutant.source) for mutant in MUTANTS)} of the bugs below were published" in text
    assert all(f"/{mutant.source.replace('#', '/issues/')})" in text for mutant in MUTANTS if mutant.source)


def test_there_are_enough_and_each_once():
    assert len(MUTANTS) >= FEWEST
    assert [name for name, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_row_names_what_there_is(mutant):
    found = pkgutil.resolve_name(mutant.target)
    assert callable(found) or isinstance(found, property | cached_property), mutant.target
    assert not mutant.source or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", mutant.source)
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert those_in(file).get(name.partition("[")[0]) is False, test
