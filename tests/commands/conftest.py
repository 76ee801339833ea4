"""What tests of commands train on."""

import pytest


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat, " * 100)
    return path
