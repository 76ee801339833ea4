"""What several rooms do with files and folders. Imports nothing of ours."""

from __future__ import annotations

from pathlib import Path


def move_away(folder: Path) -> Path:
    """Rename a folder to the first free `<name>.<number>`, which is returned."""
    number = 1
    while (new := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(new)
