"""docs/bugs.md is what the table of mutants says, and the table names what there is."""

import pkgutil
import re
from collections import Counter
from functools import cached_property

import pytest

from tests.docs.pages import text_of
from tests.docs.test_claims import those_in
from tests.verification.mutants import FEWEST
from tests.verification.mutation.mutant import OURS
from tests.verification.mutation.page import PAGE, page
from tests.verification.mutation.table import MUTANTS


def test_the_page_is_that_of_the_table():
    assert text_of(PAGE) == page(), "python -m tests.verification.mutants --page"


def test_there_are_enough_and_each_once():
    assert len(MUTANTS) >= FEWEST
    assert [name for name, count in Counter(mutant.id for mutant in MUTANTS).items() if count > 1] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_row_names_what_there_is(mutant):
    found = pkgutil.resolve_name(mutant.target)
    assert callable(found) or isinstance(found, property | cached_property), mutant.target
    assert mutant.source == OURS or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", mutant.source)
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert those_in(file).get(name.partition("[")[0]) is False, test
    for text in (mutant.bug, mutant.here):
        assert text.endswith(".") and "|" not in text
