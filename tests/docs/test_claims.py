"""What pages claim: messages are the code's, figures those of other pages."""

import ast
import re
from functools import cache
from math import inf

from tests.docs.pages import INLINE, PACKAGE, REPOSITORY, blocks_of, text_of

DOCS = REPOSITORY / "docs"
ANY = "\0"


def rows_of(page, heading):
    """The cells of the first table after a heading or mark, without its own heading."""
    after = text_of(DOCS / page).partition(heading)[2]
    table = re.search(r"((?:^\|.*\n)+)", after, re.MULTILINE)[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])]


@cache
def those_in(file):
    """The tests of a file as pytest names them, and whether each may be left out."""
    found = {}
    for node in ast.parse(text_of(REPOSITORY / file)).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for own in inner:
            if isinstance(own, ast.FunctionDef) and own.name.startswith("test_"):
                name = own.name if own is node else f"{node.name}::{own.name}"
                found[name] = any("skip" in ast.unparse(mark) for mark in own.decorator_list)
    return found


@cache
def texts_of_the_code():
    """Every text of the package; what f-strings put in is `ANY`."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else ANY for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def is_said(message):
    """Whether all parts of a message between its dots stand in one text of the code, in order."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.strip(". ").split("...")), re.DOTALL)
    return any(pattern.search(text) for text in texts_of_the_code())


def messages():
    """Those of the page on troubleshooting: its blocks of text, and what tables and lists begin with."""
    page = DOCS / "troubleshooting.md"
    blocks = [block.code for block in blocks_of(page) if block.language == "text"]
    tables = re.findall(r"^(?:\| |- )((?:`[^`]+`(?:, )?)+)(?= \||:)", text_of(page), re.MULTILINE)
    inline = [code for cells in tables for code in INLINE.findall(cells) if " " in code]
    return [line for block in blocks for line in block.splitlines()] + inline


def test_messages_are_those_of_the_code():
    assert len(messages()) > 25
    assert [message for message in messages() if not is_said(message)] == []


def test_a_message_that_nobody_says_is_found():
    assert not is_said("step ...: the loss of microbatch ... is purple")


RESULTS = "../benchmarks/results"


def table_of_bytes(times):
    """Of `simulated.md`, by kind of step and schedule, step times at so many bytes."""
    (_, *names), *rows = rows_of(f"{RESULTS}/simulated.md", f"### {times} times the bytes of 1F1B")
    found = {}
    for kind, *cells in rows:
        seconds = [inf if cell == "-" else float(cell.strip("*")) for cell in cells]
        found[kind] = dict(zip(names, seconds, strict=True))
    return found


def test_the_fastest_schedules_are_those_of_the_simulated_tables():
    (_, *kinds), *rows = rows_of(f"{RESULTS}/simulated.md", "<!-- fastest -->")
    *fastest, baseline = rows
    for times, *cells in fastest:
        table = table_of_bytes(times)
        for kind, cell in zip(kinds, cells, strict=True):
            name, figure = re.fullmatch(r"`(.+)` ([\d.]+)", cell).groups()
            assert table[kind][name] == float(figure) == min(table[kind].values()), (times, kind)
    table = table_of_bytes("1")
    assert [float(cell) for cell in baseline[1:]] == [table[kind]["1f1b"] for kind in kinds]
