"""What the site has besides the pages in this folder, and where links out of it lead.

The README, the changelog and the notebook become pages, too. A link to any other file of the repository
becomes plain text: readers of the site need not have a checkout. A link whose text is the name of a page's
file gets that page's title instead. Where a page says `<!-- help: rrfp VERB -->` stands that command's help.
"""

import contextlib
import io
import json
import posixpath
import re
from functools import cache
from pathlib import Path

from mkdocs.structure.files import File

import rrfp_jax
from rrfp_jax.commands.cli import main

REPOSITORY = Path(__file__).parents[1]
NOTEBOOK = "notebooks/quickstart.ipynb"
PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    NOTEBOOK: "notebooks/quickstart.md",
}
"""Where files outside `docs/` are in the site."""
SOURCES = {place: source for source, place in PLACES.items()}

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FILE_NAME = re.compile(r"`?[\w./-]+\.(?:md|ipynb)`?")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
HELP = re.compile(r"<!-- help: rrfp (\w+) -->")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_config(config):
    """The header of every page names the version."""
    config.site_name = f"rrfp_jax {rrfp_jax.__version__}"
    return config


def on_files(files, config):
    """Add the pages that lie elsewhere."""
    for source, place in PLACES.items():
        text = (REPOSITORY / source).read_text(encoding="utf-8")
        text = notebook_page(text) if source == NOTEBOOK else text
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links from file to file of the repository into links from page to page."""
    if page.file.src_uri == PLACES["README.md"]:
        page.meta["hide"] = ["navigation"]
    source = SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    found, end = [], 0
    for fence in FENCED.finditer(markdown):
        found += [relinked(markdown[end : fence.start()], source, page.file.src_uri), fence[0]]
        end = fence.end()
    whole = "".join([*found, relinked(markdown[end:], source, page.file.src_uri)])
    return HELP.sub(lambda match: f"```text\n{help_of(match[1])}```", whole)


def help_of(verb):
    """What a command of ours prints when it is asked for help."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        main([verb, "--help"])
    return said.getvalue()


def relinked(text, source, place):
    """A text of the file `source` as it must be on the page at `place`."""

    def link(match):
        mark, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if ":" in target:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if (where := PLACES.get(target, target.removeprefix("docs/"))) != target or target in PLACES:
            words = title_of(target) if FILE_NAME.fullmatch(words) else words
            return f"{mark}[{words}]({posixpath.relpath(where, posixpath.dirname(place) or '.')}{anchor})"
        if not (REPOSITORY / target).exists():
            return match[0]
        return f"`{target}`" if FILE_NAME.fullmatch(words) else words

    return LINK.sub(link, text)


@cache
def title_of(file):
    """The first heading of a page."""
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    found = TITLE.search(notebook_page(text) if file.endswith(".ipynb") else text)
    return found[1] if found else file


def notebook_page(text):
    """A notebook's cells as Markdown, with the outputs that are stored in it."""
    found = []
    for cell in json.loads(text)["cells"]:
        own = "".join(cell["source"])
        found.append(f"```python\n{own}\n```" if cell["cell_type"] == "code" else own)
        found += map(output_as_markdown, cell.get("outputs", []))
    return "\n\n".join(found)


def output_as_markdown(output):
    """A picture as it is, a text in a block."""
    if picture := "".join(output.get("data", {}).get("text/html", "")):
        return f"<div>{picture}</div>"
    text = "".join(output.get("text", "") or output["data"]["text/plain"])
    return f"```text\n{text.rstrip()}\n```"
