"""`python -m tests.support.notebook` runs the notebook and stores what its cells give; the site shows it."""

import os
import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
NOTEBOOK = REPOSITORY / "notebooks" / "quickstart.ipynb"

TIMES = re.compile(r"[\d,.]+ (?:tokens/s|ms|us|s)\b|idle(?: +\d+%)+")
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]\d+)?|\d+%")


def client_of(folder, limit):
    """Of a copy of the notebook that runs in the folder, in a kernel of this interpreter."""
    import nbformat  # which takes long, as the others do, and every worker imports this file
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient

    # With no folder to look for kernels in, `python3` is the running interpreter.
    manager = KernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    return NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4),
        km=manager,
        record_timing=False,
        timeout_func=limit,
        resources={"metadata": {"path": str(folder)}},
    )


def environment(folder):
    """Its kernel's variables."""
    own = {"PYTHONPATH": str(REPOSITORY), "IPYTHONDIR": str(folder / "ipython"), "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **own}


def kept(output):
    """An output as it is stored: one that can be drawn has no text beside it."""
    if output.output_type == "stream":
        return {"output_type": "stream", "name": output.name, "text": output.text}
    kind = "text/html" if "text/html" in output.data else "text/plain"
    return {
        "output_type": "execute_result",
        "data": {kind: output.data[kind]},
        "metadata": {},
        "execution_count": None,
    }


def outputs_of(cell):
    """All that a cell gave, what it printed piece by piece as one."""
    found = []
    for output in map(kept, cell.get("outputs", [])):
        if found and output["output_type"] == found[-1]["output_type"] == "stream":
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


def timeless(text):
    """A text without what differs from run to run and from machine to machine."""
    return NUMBER.sub("N", TIMES.sub("T", text)).split()


def main():
    """Run it and store it."""
    import nbformat

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        executed = client_of(folder, lambda cell: 300).execute(env=environment(folder))
    stored = nbformat.read(NOTEBOOK, as_version=4)
    for cell, own in zip(stored.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.outputs = [nbformat.from_dict(output) for output in outputs_of(own)]
    nbformat.write(stored, NOTEBOOK)


if __name__ == "__main__":
    sys.exit(main())
