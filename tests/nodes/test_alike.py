"""A node with other code, another JAX or a folder of its own is found at the start, and by its name."""

import os
import sys

import pytest

from tests.nodes import ranks

LIMIT_SECONDS = 240.0
ON = ("n0", "n1")


def write(nodes, node, file, text):
    """Write a file on a node."""
    made = nodes.run(node, "sh", "-c", f"mkdir -p {file.parent} && cat >{file}", input=text)
    assert made.returncode == 0, made.stderr


def refused(nodes, folder, first, *command):
    """What two ranks say at last, which are refused; `first` has packages that each node has for itself."""
    python_path = os.pathsep.join([str(first), str(ranks.ROOT)])
    started = ranks.start(nodes, ON, [sys.executable, *command], folder, {"PYTHONPATH": python_path})
    statuses = [rank.wait(LIMIT_SECONDS) for rank in started]
    said = [ranks.said(folder, rank).strip() for rank in range(len(ON))]
    assert statuses == [2, 2], said
    return [text.rpartition("\n")[2] for text in said]


@pytest.fixture
def packages(nodes, tmp_path):
    """A folder of packages that each node has for itself, with what the small run imports."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for node in ON:
        nodes.local(node, folder)
        write(nodes, node, folder / "activation.py", "from jax.nn import relu as activate\n")
    return folder


@pytest.fixture
def train(tmp_path):
    """The arguments of `python` that train the small run."""
    config = ranks.ROOT / "tests" / "nodes" / "small_run.py"
    return "-m", "rrfp_jax", "train", f"--config={config}", f"--config.directory={tmp_path}/runs"


@pytest.mark.slow(reason="4 s: a start on two nodes; runtime/test_alike.py has the hashes")
def test_a_node_with_other_code_is_refused(nodes, tmp_path, packages, train):
    write(nodes, "n1", packages / "activation.py", "from jax.nn import silu as activate\n")
    for said in refused(nodes, tmp_path, packages, *train):
        assert "on rank 1 (n1) layer 1, layer 2 compute something else than on rank 0 (n0). Give all" in said


@pytest.mark.slow(reason="a start on two nodes; runtime/test_alike.py has the versions")
def test_a_node_with_another_jaxlib_is_refused(nodes, tmp_path, packages):
    about = "Metadata-Version: 2.1\nName: jaxlib\nVersion: 0.10.99\n"
    write(nodes, "n1", packages / "jaxlib-0.10.99.dist-info" / "METADATA", about)
    for said in refused(nodes, tmp_path, packages, "-c", "import rrfp_jax; rrfp_jax.join()"):
        assert "on rank 0 (n0), 0.10.99 on rank 1 (n1): the numbers of this run would depend on" in said


@pytest.mark.slow(reason="3 s: a start on two nodes; test_doctor.py has such a folder")
def test_checkpoints_in_a_folder_that_a_node_has_for_itself_are_refused(nodes, tmp_path, packages, train):
    (tmp_path / "runs").mkdir()
    nodes.local("n1", tmp_path / "runs")
    for said in refused(nodes, tmp_path, packages, *train):
        assert "small.checkpoints: rank 1 (n1) cannot see what rank 0 writes there on n0" in said
    for node in ON:
        left = nodes.run(node, "find", tmp_path / "runs", "-name", "small*").stdout
        assert left == "", "what is refused leaves nothing"
