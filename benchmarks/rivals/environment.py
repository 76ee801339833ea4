"""The environment that has PyTorch, and what runs there."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, output_of

ENVIRONMENT = REPOSITORY / ".venv-rivals"

RUN_SECONDS = 900.0


def torch_finds(module: str, question: Any) -> Any:
    """What a module of this folder answers where PyTorch is; it is given a file for each, as JSON.

    Raises:
        RuntimeError: it failed; with what it said.
        subprocess.TimeoutExpired: it took longer than `RUN_SECONDS`.
    """
    with tempfile.TemporaryDirectory() as name:
        asked, answered = Path(name) / "question.json", Path(name) / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        command = [str(ENVIRONMENT / "bin" / "python"), "-m", f"benchmarks.rivals.{module}"]
        output_of([*command, str(asked), str(answered)], RUN_SECONDS)
        return json.loads(answered.read_text(encoding="utf-8"))


def require_torch() -> None:
    """End this command if the environment was never set up."""
    if not (ENVIRONMENT / ".installed").exists():
        sys.exit(f"PyTorch is missing, so nothing was compared: `make rivals` sets up {ENVIRONMENT.name}")
