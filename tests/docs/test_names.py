"""The documentation names what there is: files, pages, schedules, names of code."""

import ast
import re
from functools import cache

import pytest

from benchmarks.harness import index
from rrfp_jax.core.schedules import NAMED
from tests.docs.pages import INLINE, LINK, PACKAGE, PAGES, REPOSITORY, name_of, prose_of, text_of
from tests.docs.test_commands import targets

SOURCES = [
    path
    for folder in ("rrfp_jax", "models", "configs", "launch", "benchmarks", "tests")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
SUFFIXES = (".py", ".md", ".ipynb", ".sbatch", ".svg", ".toml")


def looks_like_a_path(word):
    return re.fullmatch(r"(?:\.\./)*[\w.-]+(?:/[\w.-]+)*/?", word) is not None and (
        word.endswith(".md") or ("/" in word and (word.endswith(SUFFIXES) or is_in_a_folder_of_ours(word)))
    )


def is_in_a_folder_of_ours(word):
    folders = {path.name for path in (*REPOSITORY.iterdir(), *PACKAGE.iterdir()) if path.is_dir()}
    return word.split("/")[0] in folders - {"runs", "build", "site"}


def exists(page, word):
    """Paths are given from the page, from the repository, or from the package on."""
    return any((folder / word).exists() for folder in (page.parent, REPOSITORY, PACKAGE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_and_links_lead_somewhere(page):
    text = prose_of(page)
    links = {link.partition("#")[0] for link in LINK.findall(text) if "://" not in link}
    paths = {word for word in INLINE.findall(text) if looks_like_a_path(word)}
    assert sorted(word for word in links | paths if not exists(page, word)) == []


def test_code_names_pages_that_there_are():
    named = {(path, page) for path in SOURCES for page in re.findall(r"docs/[\w-]+\.md", text_of(path))}
    assert named
    assert [(name_of(path), page) for path, page in sorted(named) if not (REPOSITORY / page).exists()] == []


def test_the_contents_list_every_page():
    contents = text_of(REPOSITORY / "mkdocs.yml").partition("\nnav:\n")[2]
    listed = set(re.findall(r": ([\w./-]+\.md)$", contents, re.MULTILINE))
    folder = REPOSITORY / "docs"
    pages = {page.relative_to(folder).as_posix() for page in folder.rglob("*.md")}
    assert pages <= listed, "each page has a row in mkdocs.yml"


def test_every_benchmark_is_listed_and_no_other():
    listed = re.findall(
        r"^\| `python -m benchmarks (\w+)", text_of(REPOSITORY / "benchmarks/README.md"), re.M
    )
    assert sorted(listed) == sorted(index())


def test_every_verification_is_listed():
    folder = "tests/verification"
    listed = set(re.findall(r"python -m ([\w.]+\w)", text_of(REPOSITORY / folder / "README.md")))
    commands = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__main__")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if "parse(__doc__)" in text_of(path)
    }
    assert len(commands) >= 5
    assert commands - listed == set()


@pytest.mark.parametrize(
    ("file", "begin", "end"),
    [
        ("docs/which-schedule.md", "| hints |", "| planned |"),
        ("rrfp_jax/runs/config.py", "        schedule: ", "planned or"),
    ],
)
def test_lists_of_schedules_name_every_one(file, begin, end):
    text = text_of(REPOSITORY / file).partition(begin)[2].partition(end)[0]
    assert sorted(NAMED.keys() - re.findall(r"[\w-]+", text)) == []


def test_paths_of_the_makefile_exist():
    text = text_of(REPOSITORY / "Makefile").partition("FAST :=")[2].partition("\n\n")[0]
    paths = re.findall(r"(?<!addprefix )tests/[\w/]+(?:\.py)?(?=[\s\\])", text)
    for prefix, names in re.findall(r"\$\(addprefix (\S+),([^)]+)\)", text):
        paths += [f"{prefix}{name}" for name in names.split()]
    assert len(paths) > 10 and [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_phony_targets_have_rules():
    phony = re.search(r"^\.PHONY: (.+)$", text_of(REPOSITORY / "Makefile"), re.MULTILINE)
    assert set(phony[1].split()) <= targets()


@cache
def definitions():
    """All names that sources define, members also as `Class.member`."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(text_of(path))):
            found |= defined(node)
            if isinstance(node, ast.ClassDef):
                members = set().union(*(defined(inner) for inner in ast.walk(node)))
                found |= {f"{node.name}.{member}" for member in members}
    return found


def defined(node):
    """The names that one node of a syntax tree defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.arg):
        return {node.arg}
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    if targets == [None]:  # of most nodes
        return frozenset()
    flat = [inner for target in targets if isinstance(target, ast.AST) for inner in ast.walk(target)]
    names = {inner.id for inner in flat if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in flat if isinstance(inner, ast.Attribute)}


@pytest.mark.costly(reason="it imports all that extensions may import")
def test_names_in_extending_exist():
    text = prose_of(REPOSITORY / "docs" / "extending.md")
    words = {re.sub(r"^(rrfp\.)?(schedules\.(?!py))?|\(.*\)$", "", word) for word in INLINE.findall(text)}
    names = {word for word in words if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", word)}
    assert len(names) > 10
    files = {name for name in names if name.endswith((".jsonl", ".md", ".py", ".yml"))}
    assert sorted(names - files - definitions()) == []


def test_paths_are_told_from_other_words():
    ours = ["docs/data.md", "data.md", "runtime/engine.py", "rrfp_jax/core/", "launch/slurm.sbatch"]
    others = ["runs/quickstart", "train.py", "4/n", "tokens/s", "a / b", "config.json", "--tp=2"]
    assert [word for word in ours + others if looks_like_a_path(word)] == ours
