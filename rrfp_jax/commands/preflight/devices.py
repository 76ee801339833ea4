"""Checks: JAX, its plugin, and whether this process sees the GPUs that it should."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.commands.preflight.findings import Finding, Level
from rrfp_jax.commands.preflight.surroundings import Surroundings
from rrfp_jax.runtime.run.place import MEMORY, OLD_MEMORY, visible_gpus

OLDEST = (0, 10, 2)

INSTALL = 'pip install ".[cuda13]", or ".[cuda12]" for drivers too old for CUDA 13'

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def check_versions(found: Surroundings) -> Finding:
    """Whether JAX is new enough, and its parts belong together."""
    versions = found.versions
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    if _release(versions.get("jax", "0")) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Finding("FAIL", "versions", f"{said}: too old", f"pip install -U 'jax>={oldest}'")
    plugins = [name for name in PLUGINS if name in versions]
    if len(plugins) > 1:
        return Finding("FAIL", "versions", f"{said}: two plugins", f"pip uninstall {plugins[1]}")
    odd = [name for name in plugins if _release(versions[name]) != _release(versions.get("jaxlib", "0"))]
    if odd:
        return Finding("FAIL", "versions", f"{said}: {odd[0]} is not jaxlib's version", INSTALL)
    return Finding("ok", "versions", said)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def check_gpus(found: Surroundings) -> Finding:
    """Whether JAX sees the GPUs that are here, and if not, what hides them."""
    given = found.environment.get("SLURM_STEP_GPUS") or found.environment.get("SLURM_JOB_GPUS")
    if found.platform not in {"", "cpu"}:
        return Finding("ok", "gpus", f"JAX sees {found.devices} of {found.gpus}")
    if found.gpus:
        level, why, fix = _what_hides_them(found)
        return Finding(level, "gpus", f"JAX sees none of {found.gpus}: {why}", fix)
    if given:
        said = f"SLURM has given GPU {given}, but no driver lists any"
        return Finding("FAIL", "gpus", said, "nvidia-smi on this node; in a container: --nv or --gpus all")
    if found.probe_error:
        fix = "python -c 'import jax; jax.devices()'; JAX_PLATFORMS names a platform that is not here?"
        return Finding("FAIL", "gpus", f"JAX finds no device: {found.probe_error}", fix)
    return Finding("ok", "gpus", "none here; JAX uses the CPU")


def _what_hides_them(found: Surroundings) -> tuple[Level, str, str]:
    """The first cause that applies: level, why, fix."""
    platforms = found.environment.get("JAX_PLATFORMS", "")
    visible = found.environment.get("CUDA_VISIBLE_DEVICES", "all")
    shown = bool(visible_gpus({"CUDA_VISIBLE_DEVICES": visible})) and not visible.startswith(("-", "No"))
    ask = (
        "srun --gpus-per-task=1 ..." if "SLURM_JOB_ID" in found.environment else "unset CUDA_VISIBLE_DEVICES"
    )
    driver = f"unset LD_LIBRARY_PATH; nvidia-smi for the driver's CUDA version, and then {INSTALL}"
    causes: Sequence[tuple[bool, Level, str, str]] = (
        (platforms.startswith("cpu"), "warn", f"JAX_PLATFORMS={platforms}", "unset JAX_PLATFORMS"),
        (not shown, "FAIL", f"CUDA_VISIBLE_DEVICES={visible!r} hides them", ask),
        (
            not found.gpu_files,
            "FAIL",
            "there is no /dev/nvidia* for this process",
            "srun --gpus-per-task=1 ...; in a container: --nv or --gpus all",
        ),
        (not set(PLUGINS) & set(found.versions), "FAIL", "its CUDA plugin is not installed", INSTALL),
        (True, "FAIL", found.probe_error or "the plugin finds no device", driver),
    )
    return next((level, why, fix) for applies, level, why, fix in causes if applies)


def check_shares(found: Surroundings) -> Finding | None:
    """Whether the ranks of this node have a GPU and its memory each."""
    environment, ranks = found.environment, _ranks_here(found)
    if MEMORY in environment and OLD_MEMORY in environment:
        said = f"{MEMORY} and {OLD_MEMORY} are set, which JAX refuses"
        return Finding("FAIL", "memory", said, f"unset {OLD_MEMORY}")
    gpus = _gpus_here(found)
    if not gpus or ranks <= gpus or found.platform == "cpu":
        return None
    sharers = -(-ranks // gpus)
    said = f"{ranks} ranks share {gpus} GPUs"
    asked = environment.get(MEMORY) or environment.get(OLD_MEMORY)
    if asked and _number(asked) * sharers > 1:
        fix = f"unset {MEMORY} {OLD_MEMORY}, or export {MEMORY}={0.9 / sharers:.2f}"
        return Finding("FAIL", "memory", f"{said}, and each takes {asked} of its GPU's memory", fix)
    return Finding("warn", "memory", said, f"as many GPUs as tasks: --gpus-per-task=1, or {ranks} per node")


def check_binding(found: Surroundings) -> Finding | None:
    """Whether the ranks of a group see each other's GPUs, for collectives from one to the other."""
    visible, here = len(visible_gpus(found.environment)), _gpus_here(found)
    if found.tp == 1 or found.step is None or not 0 < visible < here:
        return None
    return Finding(
        "warn",
        "binding",
        f"srun shows this task {visible} of {here} GPUs; where cgroups hide the others, collectives of "
        f"a group go through the host's memory",
        f"--gpus-per-node={here} instead of --gpus-per-task: the ranks then share them out themselves",
    )


def _ranks_here(found: Surroundings) -> int:
    if found.step is not None:
        return found.step.tasks_here
    return 1


def _gpus_here(found: Surroundings) -> int:
    here = found.environment.get("SLURM_GPUS_ON_NODE", "")
    return int(here) if here.isdecimal() else len(visible_gpus(found.environment))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0
