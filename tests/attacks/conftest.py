"""A folder of sealed files, and the key of the user whose they are."""

import pytest

from rrfp_jax.runtime.programs.executables import ENDING, KEY_FILE, SealedFiles

NAME = "0" * 64 + ENDING
STRANGER = 12345


@pytest.fixture
def own(tmp_path):
    """The environment of a user with a key."""
    return {KEY_FILE: str(tmp_path / "home" / "programs.key")}


@pytest.fixture
def store(tmp_path, own):
    """A folder with a file."""
    (tmp_path / "home").mkdir()
    files = SealedFiles(tmp_path / "runs" / ".executables", own)
    files.write(NAME, b"sound")
    return files
