"""The configuration `quickstart`, made tiny, with arguments of the command line."""

from pathlib import Path

CONFIG = f"--config={Path(__file__).parents[2] / 'configs' / 'quickstart.py'}"
TINY = {  # the only shape that these tests compile
    "steps": 3,
    "model.n_layers": 1,
    "mesh.pp": 2,
    "model.d_model": 8,
    "model.n_heads": 1,
    "model.d_ff": 8,
    "sequence_length": 8,
    "batch": 2,
    "microbatches": 2,
}


def with_texts(folder):
    """A folder with a text to train on, and with files that are refused."""
    (folder / "text.txt").write_text("the cat sat on the mat, " * 100)
    (folder / "short.txt").write_text("abc")
    (folder / "empty.txt").write_text("")
    (folder / "nothing.py").write_text("")
    return folder


def arguments(folder, **overrides):
    given = {**TINY, "path": folder / "text.txt", "directory": folder / "runs", **overrides}
    return [CONFIG, *(f"--config.{name}={value}" for name, value in given.items())]


ROOT = Path(__file__).parents[2]


SMALL = {"model.n_layers": 3, "mesh.pp": 2, "model.d_model": 16, "model.n_heads": 2, "model.d_ff": 16}
SMALL |= {"sequence_length": 8, "batch": 4, "microbatches": 4, "steps": 2}


def tiny(text, **overrides):
    given = {**SMALL, "path": text, **overrides}
    return [
        f"--config={ROOT / 'configs' / 'quickstart.py'}",
        *(f"--config.{name}={value}" for name, value in given.items()),
    ]
