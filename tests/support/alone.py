"""Commands as a user starts them: in a folder of theirs, with none of this process's Python settings."""

import os
import socket
import subprocess

from tests.support.kept import with_cache


def run(*command, folder, limit=300.0, **variables):
    """What a command printed in a folder; it must succeed within `limit` seconds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**with_cache({**kept, "JAX_PLATFORMS": "cpu"}), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
