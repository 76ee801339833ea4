"""What a check of the preflight says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """A check's answer.

    Attributes:
        level: ok, warn (it may cost something), FAIL (a run would not work).
        subject: one word, such as "gpus".
        said: what was found, and why that is wrong if it is.
        fix: what to type, or to do; empty if ok.
    """

    level: Level
    subject: str
    said: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.level:4}  {self.subject}: {self.said}"
        return f"{line}\n      fix: {self.fix}" if self.fix else line
