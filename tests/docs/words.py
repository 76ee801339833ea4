"""`python -m tests.docs.words [--old=COMMIT]`: words by page of the site, code included, as `wc -w` does."""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable

from tests.docs.pages import REPOSITORY

CONTENTS = "mkdocs.yml"
NOT_COUNTED = ("CHANGELOG.md",)
"""A history, which grows."""

GENERATED = re.compile(r"^:::.*\n(?: +\S.*\n)*|^<!-- help: .*\n", re.MULTILINE)

Read = Callable[[str], str]
"""The text of a file by its path in the repository; "" if there is none."""


def now(path: str) -> str:
    """A file of this checkout."""
    file = REPOSITORY / path
    return file.read_text(encoding="utf-8") if file.exists() else ""


def of_commit(commit: str) -> Read:
    """Files of a commit."""

    def read(path: str) -> str:
        command = ["git", "-C", str(REPOSITORY), "show", f"{commit}:{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    return read


def pages_in(contents: str, read: Read) -> list[str]:
    """The files of the pages that a site's contents list, and README.md, in order."""
    listed = re.findall(r"^ +- (?:.*: )?([\w./-]+\.md)$", contents.partition("\nnav:\n")[2], re.MULTILINE)
    files = [next((p for p in (f"docs/{page}", page) if read(p)), "") for page in listed]
    return list(dict.fromkeys(["README.md", *(file for file in files if file and file not in NOT_COUNTED)]))


def counted(read: Read) -> dict[str, int]:
    """Words by page, without the directives in whose places docstrings and texts of commands come."""
    return {page: len(GENERATED.sub("", read(page)).split()) for page in pages_in(read(CONTENTS), read)}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", metavar="COMMIT", help="to compare with")
    old = parser.parse_args().old
    new = counted(now)
    if not old:
        for page, words in new.items():
            print(f"{words:7,}  {page}")
        print(f"{sum(new.values()):7,}  all pages")
        return
    before = counted(of_commit(old))
    for page in dict.fromkeys([*new, *before]):
        print(f"{before.get(page, 0):7,} -> {new.get(page, 0):7,}  {page}")
    print(f"{sum(before.values()):7,} -> {sum(new.values()):7,}  all pages")


if __name__ == "__main__":
    main()
