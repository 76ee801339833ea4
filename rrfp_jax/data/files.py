"""Text files under a path, by names that are the same on every machine."""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import expanded
from rrfp_jax.files import opened

TEXT_SUFFIXES = (
    *(".md", ".rst", ".tex", ".txt"),
    *(".c", ".cc", ".cpp", ".cu", ".go", ".h", ".hpp", ".java", ".js", ".py", ".pyi", ".rs", ".sh", ".ts"),
    *(".cfg", ".css", ".csv", ".html", ".ini", ".json", ".jsonl", ".toml", ".xml", ".yaml", ".yml"),
)
# Installed packages are not the standard library, and its tests are longer than all the rest (20 of 32 MB).
NOT_STANDARD_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test")


def find_files(path: str, suffixes: Collection[str] = TEXT_SUFFIXES) -> list[tuple[str, Path]]:
    """(name from the root, file) of all files that `path` stands for, sorted by name.

    Args:
        path: a file, a folder (searched to any depth for files with one of `suffixes`; names that begin with
            a dot are passed over), a glob (`**` for any depth; takes every file that matches), or "" for the
            *.py files of the running Python's standard library without its tests.
        suffixes: in lower case, with their dot.

    Raises:
        UsageError: there is none.
    """
    files: Iterable[Path]
    root = expanded("path", path) if path else Path(sysconfig.get_path("stdlib"))
    if not path:
        files = _walk(root, (".py",), NOT_STANDARD_LIBRARY)
    elif root.is_dir():
        files = _walk(root, suffixes)
    else:
        files = [root] if root.is_file() else [Path(name) for name in glob.glob(str(root), recursive=True)]
        if not files:
            raise UsageError(
                f"path={path!r}: no such file or folder, and no match as a glob, from {Path.cwd()}; "
                "give a path that exists on this machine, or '' for Python's standard library"
            )
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), root.parent.parts))
    return sorted((file.relative_to(root).as_posix(), file) for file in files if file.is_file())


def size_of(file: Path) -> int:
    """Bytes of a file; -1 if it cannot be read."""
    try:
        with opened(file) as descriptor:
            return os.fstat(descriptor).st_size
    except OSError:
        return -1


def _walk(root: Path, suffixes: Collection[str], without: Collection[str] = ()) -> Iterator[Path]:
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if not name.startswith(".") and name not in without]
        for name in names:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in suffixes:
                yield Path(folder, name)
