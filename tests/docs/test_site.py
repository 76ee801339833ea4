"""The site that `make docs` builds."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from importlib import import_module
from types import ModuleType
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import rrfp_jax
from rrfp_jax.core.tasks import Kind
from tests.docs.pages import REPOSITORY
from tests.docs.test_words import TERMS
from tests.support.browser import CHROMIUM, browser

LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""What a browser fetches by itself."""
PUBLIC = ["rrfp_jax", *(f"rrfp_jax.{name}" for name in ("data", "loggers", "schedules", "weights"))]
"""Modules whose `__all__` users have, all of which is in the reference."""


@dataclass
class Read(HTMLParser):
    """The anchors of a page, the links on it, and what is fetched to show it."""

    anchors: set = field(default_factory=set)
    links: set = field(default_factory=set)
    fetched: set = field(default_factory=set)

    def __post_init__(self):
        super().__init__()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.add(given["href"])
        self.fetched |= {value for name, value in attrs if (tag, name) in LOADED and value}


pytestmark = pytest.mark.slow(reason="it builds the site")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, and what was said when it was built."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done.stderr


@pytest.fixture(scope="module")
def read(site):
    """Every page of the site, by its path in it."""
    folder, found = site[0], {}
    for path in sorted(folder.rglob("*.html")):
        page = Read()
        page.feed(path.read_text(encoding="utf-8"))
        found[path.relative_to(folder).as_posix()] = page
    assert len(found) > 30
    return found


def leads_nowhere(folder, read, page, link):
    """Whether a link inside the site has no target."""
    address, anchor = urldefrag(link)
    if urlsplit(link).scheme:
        return False
    target = folder / page if not address else (folder / page).parent / unquote(address)
    if page == "404.html":  # it is shown at any address, so its links begin at the site's root
        target = folder / address.lstrip("/")
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return True
    own = read.get(target.resolve().relative_to(folder.resolve()).as_posix())
    return bool(anchor) and (own is None or unquote(anchor) not in own.anchors)


def test_it_is_built_without_a_warning(site):
    assert "WARNING" not in site[1] and "ERROR" not in site[1], site[1]


def test_every_link_inside_leads_to_a_page_and_an_anchor(site, read):
    links = [(page, link) for page, own in read.items() for link in own.links]
    assert len(links) > 1000
    assert [pair for pair in links if leads_nowhere(site[0], read, *pair)] == []


def test_links_that_lead_nowhere_are_found(site, read):
    assert leads_nowhere(site[0], read, "index.html", "no-such-page.html")
    assert leads_nowhere(site[0], read, "index.html", "memory.html#no-such-anchor")
    assert not leads_nowhere(site[0], read, "reference/train.html", "../memory.html#the-theorem")


def test_nothing_is_fetched_from_elsewhere(site, read):
    assert {url for own in read.values() for url in own.fetched if urlsplit(url).netloc} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site[0].rglob("*.css"))
    assert "url(http" not in styles and "@import" not in styles


def test_patterns_in_docstrings_are_no_emphasis(site):
    """As `"0.*" or "1.*"` would be without backticks."""
    pages = {path: path.read_text(encoding="utf-8") for path in (site[0] / "reference").glob("*.html")}
    assert [path.name for path, text in pages.items() if "<em>" in text] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module, read):
    told = set().union(*(own.anchors for page, own in read.items() if page.startswith("reference/")))
    found = import_module(module)
    others = [name for name in found.__all__ if not isinstance(getattr(found, name), ModuleType | Kind)]
    assert sorted({f"{module}.{name}" for name in others} - told) == []


def test_markdown_is_rendered(site):
    """The site's parser wants an empty line before a list or a table, which others do not."""
    for path in sorted(site[0].rglob("*.html")):
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", article, flags=re.DOTALL)
        paragraphs = "\n".join(re.findall(r"<p>(.*?)</p>", text, re.DOTALL))
        left = re.findall(r"^\s*(?:- |\d+\. |\|).*|.*(?:\*\*|\]\().*", paragraphs, re.MULTILINE)
        assert left == [], path.name


def test_links_have_titles(site):
    """No file's name stands for a page."""
    for path in sorted(site[0].rglob("*.html")):
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        texts = re.findall(r"<a [^>]*>(?:<code>)?([\w./-]+\.md)(?:</code>)?</a>", article)
        assert texts == [], path.name


def test_every_page_names_the_version(site):
    assert f"rrfp_jax {rrfp_jax.__version__}" in (site[0] / "install.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shown(site, tmp_path_factory):
    """A browser."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with browser(tmp_path_factory.mktemp("profile")) as own:
        yield own


def opened(shown, path, width):
    shown.open(path, width=width)
    shown.until("document.readyState == 'complete'")


SEARCHED = """(() => {
    const field = document.querySelector('.md-search__input'), toggle = document.querySelector('#__search');
    const links = [...document.querySelectorAll('.md-search-result__link')].map(link => link.href);
    if (!toggle.checked) toggle.click();
    if (field.value !== TEXT) { field.focus(); field.value = TEXT; }
    if (!links.length) field.dispatchEvent(new Event('keyup', { bubbles: true }));
    return links.join(' ');
})()"""


def test_pages_read_from_disk_can_be_searched(site, shown):
    opened(shown, site[0] / "index.html", 1400)
    found = shown.until(SEARCHED.replace("TEXT", "'torch.distributed.pipelining'"))
    assert "coming-from.html" in found
    assert shown.complaints == []


def test_terms_of_the_field_are_in_the_search_index(site):
    docs = json.loads((site[0] / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    texts = [f"{doc['title']} {doc['text']}".lower() for doc in docs if "reference/" not in doc["location"]]
    assert [term for term in TERMS if not any(term.lower() in text for text in texts)] == []


@pytest.mark.parametrize("width", [400, 1400])
def test_no_page_is_wider_than_the_window_and_no_code_is_clipped(site, shown, width):
    clipped = """[...document.querySelectorAll('pre > code')].filter(
        code => code.scrollWidth > code.clientWidth + 1 && getComputedStyle(code).overflowX == 'hidden'
    ).length"""
    for page in ("index", "coming-from", "which-schedule", "reference/commands", "reference/train"):
        opened(shown, site[0] / f"{page}.html", width)
        assert shown.value("document.documentElement.scrollWidth") <= width, page
        assert shown.value(clipped) == 0, page
        if page == "index":  # whose picture is read, not guessed
            assert shown.value("document.querySelector('img[src$=\"step.png\"]').width") >= 700
