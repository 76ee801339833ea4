"""What programs were compiled for by `rrfp-compile`, so that a run that finds none of them can say why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import jax

from rrfp_jax.environment import ENVIRONMENT
from rrfp_jax.json_files import Unreadable, read_json, write_json
from rrfp_jax.runtime.programs.executables import COMPILER_VARIABLES, compiler_of, flags_for

NAME = "ahead-{}.json"
"""Of the file beside the programs, by the run's name."""


@dataclass(frozen=True)
class MadeFor:
    """What tells compilers and devices apart.

    Attributes:
        device: JAX's name of the card.
        compiler: its package and version.
        jax_version: of JAX.
        processes: of the run.
        flags: for the compiler.
    """

    device: str
    compiler: str
    jax_version: str
    processes: int
    flags: str

    @classmethod
    def of(cls, device: jax.Device, processes: int, environment: Mapping[str, str] = ENVIRONMENT) -> MadeFor:
        """Of programs that are compiled in this process for such a device."""
        flags = (flags_for(device.platform, environment.get(name)) for name in COMPILER_VARIABLES)
        return cls(
            device=device.device_kind,
            compiler=compiler_of(device),
            jax_version=jax.__version__,
            processes=processes,
            flags=" ".join(filter(None, flags)),
        )

    def write(self, folder: Path, run: str) -> None:
        """Beside the programs of a run."""
        write_json(folder / NAME.format(run), asdict(self))


def why_compiled(folder: Path, run: str, here: MadeFor) -> str | None:
    """Why programs that were compiled ahead for a run are not those that it needs; None if none were.

    Args:
        folder: of programs.
        run: its name.
        here: what it compiles for.
    """
    file = folder / NAME.format(run)
    if not file.is_file():
        return None
    try:
        made = asdict(read_json(file, MadeFor))
    except Unreadable as error:
        return str(error)
    there = asdict(here)
    other = [f"{name} {made[name]!r}, here {own!r}" for name, own in there.items() if made[name] != own]
    reason = "; ".join(other) or "the config, or this user's key (docs/security.md), is another"
    return f"rrfp-compile has made programs for this run in {folder}, but not all that it needs: {reason}"
