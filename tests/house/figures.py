"""How large the house is: `python -m tests.house.figures [--old=COMMIT] [--json=FILE] [--list]`.

Code lines are lines without blanks, comments, docstrings and imports, after `ruff format` at 110 columns and
without any `fmt: off`. A function is *named once* if its name stands once in the package besides its `def`.
"""

import argparse
import ast
import collections
import contextlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from pathlib import Path

from tests.support.syntax import arguments_of, lines_of, named

ROOT = Path(__file__).parents[2]
COLUMNS = 110
FOLDERS = ("models", "configs", "benchmarks", "examples", "notebooks", "tests")
ENGINE = ("core", "sim", "runtime", "launcher", "trace", "nixl")
"""Rooms that are counted as the engine, at older commits, too: `trace` was `core/measure`."""

MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_ARGUMENTS = 600, 50, 10
KINDS = ("FORWARD", "BACKWARD", "INPUT", "WEIGHT")
LETTERS = ("F", "B", "I", "W")
ENVIRONMENT = ("environ", "environb", "getenv")
FORMATTING = re.compile(r"#\s*fmt:\s*(off|on|skip)")


def formatted(root, files):
    """The sources of files, as ruff formats them, by path below a root."""
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            copy = Path(scratch) / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(FORMATTING.sub("#", (root / file).read_text(encoding="utf-8")), encoding="utf-8")
        command = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", "--no-cache"]
        subprocess.run([*command, f"--line-length={COLUMNS}", scratch], check=True)
        return {file: (Path(scratch) / file).read_text(encoding="utf-8") for file in files}


def code_lines(text):
    """How many lines of a source are code: no blank, comment, docstring or import."""
    tree, left_out = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            left_out |= {*range(node.lineno, node.end_lineno + 1)}
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    skipped |= {tokenize.ENDMARKER, tokenize.ENCODING}
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    return len(lines - left_out)


def _is_docstring(node):
    """A string that stands alone, wherever: also the one below a constant."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def is_kind(node):
    """Whether an expression names a kind of task, or a direction."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.value.id in ("Kind", "Direction") and node.attr in KINDS
    return isinstance(node, ast.Name) and node.id in KINDS


def tables_by_kind(tree, indexed):
    """Lines of literals with an entry for each kind, or for some of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [key for key in node.keys if key is not None]
            letters = [key for key in keys if isinstance(key, ast.Constant) and key.value in LETTERS]
            if len(keys) > 1 and (sum(map(is_kind, keys)) > 1 or len(letters) == len(keys)):
                yield node.lineno
        elif isinstance(node, ast.Subscript) and _is_letters(node.value):
            yield node.lineno
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and _names(node) & indexed:
            listed = isinstance(node.value, ast.Tuple | ast.List)
            if listed or _is_letters(node.value) or _over_kinds(node.value):
                yield node.lineno


def _is_letters(node):
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and sorted(node.value) == sorted(LETTERS)
    )


def _names(node):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _over_kinds(node):
    """Whether a value is made by a loop over all kinds."""
    made = (n for n in ast.walk(node) if isinstance(n, ast.comprehension))
    return any(isinstance(n.iter, ast.Name) and n.iter.id == "Kind" for n in made)


def indexed_by_kind(trees):
    """By file, names of its constants that it, or who imports them, indexes by something called `kind`."""
    found = collections.defaultdict(set)
    for file, tree in trees.items():
        imported = {
            alias.name: f"{node.module.replace('.', '/')}.py"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                index = node.slice
                called = index.attr if isinstance(index, ast.Attribute) else getattr(index, "id", "")
                if called in ("kind", "self"):
                    found[imported.get(node.value.id, file)].add(node.value.id)
    return found


def comparisons(tree):
    """(line, whether with one kind) of comparisons with kinds: `kind is X`, or `kind in (X, Y)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if isinstance(node.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
                if any(is_kind(side) and not _is_direction(side) for side in sides):
                    yield node.lineno, True
            elif any(any(map(is_kind, getattr(side, "elts", ()))) for side in sides):
                yield node.lineno, False


def _is_direction(node):
    return isinstance(node, ast.Attribute) and node.value.id == "Direction"


def reads_environment(tree):
    """Whether a module reads environment variables."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and any(alias.name in ENVIRONMENT for alias in node.names))
        for node in ast.walk(tree)
    )


def room_of(file):
    """The folder of a file that figures are summed by: a room of the package, or a folder beside it."""
    parts = Path(file).parts
    return parts[0] if parts[0] != "rrfp_jax" else parts[1].removesuffix(".py")


def named_once(trees):
    """Functions of the package that are named once besides their `def`, as `file:line name`."""
    uses, defined = collections.Counter(), collections.defaultdict(list)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
            elif isinstance(node, ast.ImportFrom):
                uses.update(alias.name for alias in node.names if room_of(file) == "__init__")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined[node.name].append((file, node.lineno))
    once = ((name, *places[0]) for name, places in defined.items() if len(places) == 1 and uses[name] == 1)
    return {(file, f"{line} {name}") for name, file, line in once if not name.startswith("__")}


def found_in(root):
    """What is counted, as `{what: [(file, entry), ...]}`, and numbers of lines by file."""
    files = [
        p.relative_to(root).as_posix() for p in sorted(root.rglob("*.py")) if _counts(p.relative_to(root))
    ]
    texts = formatted(root, files)
    trees = {file: ast.parse(text) for file, text in texts.items()}
    ours = {file: tree for file, tree in trees.items() if file.startswith("rrfp_jax/")}
    indexed = indexed_by_kind(ours)
    lists = collections.defaultdict(list)
    for file, tree in trees.items():
        length = len((root / file).read_text(encoding="utf-8").splitlines())
        lists["files"] += [(file, "")]
        lists["lines"] += [(file, length)]
        lists["code"] += [(file, code_lines(texts[file]))]
        lists["files over 600"] += [(file, str(length))] * (length > MOST_LINES)
        functions = named(tree, ast.FunctionDef | ast.AsyncFunctionDef)
        long = [name for name, node in functions if lines_of(node) > MOST_LINES_OF_A_FUNCTION]
        lists["functions over 50"] += [(file, name) for name in long]
        classes = list(named(tree, ast.ClassDef))
        lists["classes"] += [(file, name.rpartition(".")[2]) for name, _ in classes]
        lists["arguments over 10"] += [(file, n) for n, c in classes if arguments_of(c) > MOST_ARGUMENTS]
    for file, tree in ours.items():
        lists["tables by kind"] += [
            (file, str(line)) for line in sorted({*tables_by_kind(tree, indexed[file])})
        ]
        compared = sorted(comparisons(tree))
        lists["kind is"] += [(file, str(line)) for line, single in compared if single]
        lists["kind in"] += [(file, str(line)) for line, single in compared if not single]
        lists["reads environ"] += [(file, "")] * reads_environment(tree)
    lists["named once"] = sorted(named_once(ours))
    return lists


def _counts(path):
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.parts[0] in ("rrfp_jax", *FOLDERS)


SUMS = ("files", "lines", "code", "named once", "classes twice", "tables by kind", "kind is", "kind in")
MORE = ("reads environ", "functions over 50", "files over 600", "arguments over 10")


def figures(root):
    """By room or folder, and in sums: all figures; and the lists that they are the lengths of."""
    lists = found_in(root)
    every = sorted({room_of(file) for file, _ in lists["files"]})
    rooms = [room for room in every if room not in FOLDERS]
    groups = {room: [room] for room in (*rooms, *(folder for folder in FOLDERS if folder in every))}
    groups["= engine"] = [room for room in rooms if room in ENGINE]
    groups["= rest of rrfp_jax"] = [room for room in rooms if room not in ENGINE]
    groups["= rrfp_jax"] = rooms
    groups["= all but tests"] = [room for room in every if room != "tests"]
    table = {group: figures_of(lists, {*members}) for group, members in groups.items()}
    return {
        "figures": table,
        "docs words": words(root),
        "touched": touched(root),
        "lists": {k: v for k, v in lists.items() if k in MORE + SUMS},
    }


def figures_of(lists, rooms):
    """The figures of some rooms together."""
    own = {what: [entry for file, entry in found if room_of(file) in rooms] for what, found in lists.items()}
    found = {
        what: sum(own[what]) if what in ("lines", "code") else len(own.get(what, ())) for what in SUMS + MORE
    }
    found["classes twice"] = len([n for n, times in collections.Counter(own["classes"]).items() if times > 1])
    return found


def words(root):
    """Words of the documentation: its pages, and all Markdown files."""
    pages = [
        path
        for path in root.rglob("*.md")
        if not any(p.startswith(".") for p in path.relative_to(root).parts)
    ]
    count = {path: len(path.read_text(encoding="utf-8").split()) for path in pages}
    docs = sum(number for path, number in count.items() if path.relative_to(root).parts[0] == "docs")
    return {"docs/": docs, "all *.md": sum(count.values())}


def touched(root):
    """By what a diff of tests/house/diffs adds, how many files of the package it touches."""
    diffs = sorted((root / "tests" / "house" / "diffs").glob("*.diff"))
    return {path.stem: path.read_text(encoding="utf-8").count("\n+++ b/rrfp_jax/") for path in diffs}


def in_words(new, old=None):
    """The table, with what it was before each figure."""

    def cell(group, what):
        now = new["figures"].get(group, {}).get(what, 0)
        if old is None:
            return f"{now:,}"
        return f"{old['figures'].get(group, {}).get(what, 0):,}>{now:,}"

    groups = list(dict.fromkeys([*(old or new)["figures"], *new["figures"]]))
    groups.sort(key=lambda group: group.startswith("="))
    rows = [["", *SUMS, *MORE], *([group, *(cell(group, what) for what in SUMS + MORE)] for group in groups)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in rows]
    for title, what in (("words", "docs words"), ("files touched to add", "touched")):
        before = "" if old is None else f"{old[what]} > "
        lines.append(f"{title}: {before}{new[what]}")
    return "\n".join(lines)


@contextlib.contextmanager
def tree_of(commit):
    """A commit's files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
        if packed.returncode:
            raise SystemExit(f"--old={commit}: {packed.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def main(arguments):
    parser = argparse.ArgumentParser(prog="python -m tests.house.figures", description=__doc__)
    parser.add_argument("--old", metavar="COMMIT", help="count this commit, too, and show both")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and lists here")
    parser.add_argument("--list", action="store_true", help="print what was counted, but for lines and names")
    options = parser.parse_args(arguments)
    new, old = figures(ROOT), None
    if options.old:
        with tree_of(options.old) as folder:
            old = figures(folder)
    print(in_words(new, old))
    if options.list:
        shown = ("tables by kind", "kind is", "kind in", *MORE)
        print(
            "\n".join(
                f"{what}: {file}:{entry}" for what in shown for file, entry in new["lists"].get(what, ())
            )
        )
    if options.json:
        options.json.write_text(json.dumps({"new": new, "old": old}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
