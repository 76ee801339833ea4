"""The table of the fastest schedules is what its command writes."""

import re
from math import isinf

from benchmarks.simulated import FACTORS, Row, _fastest
from tests.docs.pages import REPOSITORY, text_of
from tests.docs.test_claims import table_of_bytes


def test_the_table_of_the_fastest_is_written_from_the_tables_by_memory():
    rows = [
        Row(kind, factor, {name: time for name, time in times.items() if not isinf(time)}, {})
        for factor in FACTORS
        for kind, times in table_of_bytes(f"{factor:g}").items()
    ]
    page = text_of(REPOSITORY / "benchmarks/results/simulated.md")
    written = re.search(r"<!-- fastest -->\n(.*?)<!-- end of fastest -->", page, re.DOTALL)[1]
    assert _fastest(rows) == written.strip()
