"""Commands that are asked something in JSON and answer in JSON; and the environment that has PyTorch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import REPOSITORY, output_of

ENVIRONMENT = REPOSITORY / ".venv-rivals"

RUN_SECONDS = 900.0


def answer_of(command: Sequence[str], question: Any) -> Any:
    """What a command answers. It is given two files: with the question, and for the answer.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as name:
        asked, answered = Path(name) / "question.json", Path(name) / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        output_of([*command, str(asked), str(answered)], RUN_SECONDS, {"JAX_PLATFORMS": "cpu"})
        return json.loads(answered.read_text(encoding="utf-8"))


def torch_finds(module: str, question: Any) -> Any:
    """What a module of this folder, run where PyTorch is, answers; see `answer_of`."""
    return answer_of([str(ENVIRONMENT / "bin" / "python"), "-m", f"benchmarks.rivals.{module}"], question)


def require_torch() -> None:
    """End this command if the environment was never set up."""
    if not (ENVIRONMENT / ".installed").exists():
        sys.exit(f"PyTorch is missing, so nothing was compared: `make rivals` sets up {ENVIRONMENT.name}")
