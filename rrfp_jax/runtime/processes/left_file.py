"""A file that a process leaves in the run's folder for the launcher: there whole, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def leave_file(folder: Path | int, name: str, content: Any) -> None:
    """Write plain data as JSON.

    Args:
        folder: its path, or an open descriptor of it, which still leads there after it was renamed.
        name: of the file.
        content: plain data.

    Raises:
        OSError: it cannot be written.
    """
    where = folder if isinstance(folder, int) else os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    part = f".{name}.part"
    try:
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=where)
        with os.fdopen(file, "w", encoding="ascii") as out:
            json.dump(content, out)
        os.replace(part, name, src_dir_fd=where, dst_dir_fd=where)
    finally:
        if where is not folder:
            os.close(where)
