"""The command line of a tiny quickstart."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


TINY = {"model.n_layers": 3, "mesh.pp": 2, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16}
TINY |= {"sequence_length": 8, "batch": 4, "microbatches": 4, "steps": 2}


def tiny(text, **overrides):
    given = {**TINY, "path": text, **overrides}
    return [
        f"--config={ROOT / 'configs' / 'quickstart.py'}",
        *(f"--config.{name}={value}" for name, value in given.items()),
    ]
