"""The pages of the documentation, and what is in them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "rrfp_jax"
FOLDERS = [
    *(
        ".",
        "docs",
        "docs/reference",
        "launch",
        "benchmarks",
        "benchmarks/results",
        "tests/house",
        "tests/verification",
    ),
    "rrfp_jax/core",
]
PAGES = [page for folder in FOLDERS for page in sorted((REPOSITORY / folder).glob("*.md"))]

FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
GIVEN = re.compile(r"<!-- given\n((?:(?!-->).)*)-->\n$", re.DOTALL)
TITLE = re.compile(r'title="([\w./-]+)"')
FOLLOWS = re.compile(r"<!-- follows ([\w-]+\.md) -->")
PRINTED = re.compile(r"\n\n```\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    code: str
    given: str
    title: str
    printed: str


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


@cache
def text_of(page):
    return page.read_text(encoding="utf-8")


def prose_of(page):
    """A page's text without its blocks."""
    return FENCE.sub("", text_of(page))


def blocks_of(page):
    text = text_of(page)
    for found in FENCE.finditer(text):
        given, title = GIVEN.search(text[: found.start()]), TITLE.search(found[2])
        printed = PRINTED.match(text, found.end())
        yield Block(
            language=found[1],
            code=found[3],
            given=given[1] if given else "",
            title=title[1] if title else "",
            printed=printed[1] if printed else "",
        )


def files_of(page):
    """The files that readers of a page have: its own, and those of the page that it says it follows."""
    before = FOLLOWS.search(text_of(page))
    found = files_of(page.parent / before[1]) if before else {}
    return found | {block.title: block.code for block in blocks_of(page) if block.title}
