"""Who wrote a file of code, told by its path. Imports nothing of ours."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from typing import Literal, TypeAlias

Author: TypeAlias = Literal["user", "ours", "jax", "package", "standard"]

OURS = os.path.dirname(__file__) + os.sep
PACKAGES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))
STANDARD = ("<frozen ", "<string>", *(sysconfig.get_path(n) + os.sep for n in ("stdlib", "platstdlib")))


def author_of(file: str) -> Author:
    """The author of a file, whose path is given as Python has it in frames."""
    if file.startswith(OURS):
        return "ours"
    if is_of(file, "jax") or is_of(file, "jaxlib"):
        return "jax"
    if file.startswith(PACKAGES) or re.search("/(site|dist)-packages/", file):
        return "package"
    return "standard" if file.startswith(STANDARD) else "user"


def is_of(file: str, package: str) -> bool:
    """Whether a file is in the folder of a package that this process has imported."""
    begin = getattr(sys.modules.get(package), "__file__", None)
    return begin is not None and file.startswith(os.path.dirname(begin) + os.sep)
