"""A node with other code, another JAX or a folder of its own is found at the start, and by its name."""

import pytest

from tests.nodes import ranks

TRAIN = ("-m", "rrfp_jax", "train", f"--config={ranks.ROOT}/tests/nodes/small_run.py")
RELU, SILU = "from jax.nn import relu as activate\n", "from jax.nn import silu as activate\n"


def installed(folder, name, version):
    """A folder in which another version of a package seems to be installed."""
    made = folder / f"{name}-{version}.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


@pytest.fixture
def code(tmp_path):
    """A folder of code, which every node may have for itself."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "activation.py").write_text(RELU)
    return folder


def test_a_node_with_other_code_is_refused(nodes, tmp_path, code):
    nodes.local("n1", code)
    nodes.run("n1", "tee", code / "activation.py", input=SILU)
    found = ranks.ended(ranks.start(nodes, tmp_path, *TRAIN, path=[code, code]), tmp_path)
    said = "on rank 1 (n1) layer 1, layer 2 compute something else than on rank 0 (n0). Give all nodes"
    for status, last in found:
        assert status == 2 and said in last, found


def test_a_node_with_another_jaxlib_is_refused_and_one_with_another_flax_is_told(nodes, tmp_path):
    other = installed(installed(tmp_path / "other", "jaxlib", "0.10.99"), "flax", "9.9")
    found = ranks.ended(
        ranks.start(nodes, tmp_path, "-c", "import rrfp_jax; rrfp_jax.join()", path=["", other]), tmp_path
    )
    for status, last in found:
        assert status == 2 and "jaxlib is 0." in last and "0.10.99 on rank 1 (n1): the numbers" in last, found


def test_checkpoints_in_a_folder_that_a_node_has_for_itself_are_refused(nodes, tmp_path, code):
    (tmp_path / "runs").mkdir()
    nodes.local("n1", tmp_path / "runs")
    found = ranks.ended(ranks.start(nodes, tmp_path, *TRAIN, path=[code, code]), tmp_path)
    said = "small.checkpoints: rank 1 (n1) cannot see what rank 0 writes there on n0"
    for status, last in found:
        assert status == 2 and said in last, found
    for node in ("n0", "n1"):
        left = nodes.run(node, "find", tmp_path / "runs", "-name", "small*").stdout
        assert left == "", "what is refused leaves nothing"
