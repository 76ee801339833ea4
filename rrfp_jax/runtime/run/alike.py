"""What must be alike in all processes of a run: packages, and the programs that they trace.

A node with other code, or another JAX, would train on with other numbers, and nothing would tell.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

from rrfp_jax.errors import UsageError
from rrfp_jax.printing import warn
from rrfp_jax.runtime.run.world import World

COMPILING = ("rrfp_jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
"""Packages that decide what is computed, or how processes talk: other versions are refused."""

TRACED = ("flax", "optax", "numpy", "Python")
"""What only traces programs, which are compared themselves: other versions are told."""

MOST_NAMED = 4

T = TypeVar("T")


def found_versions(names: Iterable[str] = (*COMPILING, *TRACED)) -> dict[str, str]:
    """Of those packages, and of Python, that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = platform.python_version() if name == "Python" else version(name)
    return found


def learn_hosts(world: World) -> None:
    """Learn where all ranks are, and compare their packages; UsageError if numbers could differ by them."""
    told = world.gather("the versions of packages", [platform.node(), found_versions()])
    world.hosts = [host for host, _ in told]
    other = differing_versions([own for _, own in told], world.hosts)
    if refused := [said for name, said in other.items() if name in COMPILING]:
        raise UsageError(
            f"{'; '.join(refused)}: the numbers of this run would depend on where a stage runs. Install the "
            f"same versions on every node"
        )
    if other and world.rank == 0:
        said = "; ".join(other.values())
        warn(f"{said}: training begins only if all ranks trace the same layers, loss and optimizer")


def differing_versions(of_ranks: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> dict[str, str]:
    """By package of which ranks have several versions, which ones have which. One that lacks it is passed."""
    said = {}
    for name in dict.fromkeys(name for own in of_ranks for name in own):
        ranks = by_value(own.get(name) for own in of_ranks)
        ranks.pop(None, None)
        if len(ranks) > 1:
            each = (f"{version} on {who(those, hosts)}" for version, those in ranks.items())
            said[name] = f"{name} is {', '.join(each)}"
    return said


def check_programs(world: World, programs: Mapping[str, str]) -> None:
    """Compare hashes of what all processes have traced, by name; UsageError if any has something else."""
    gathered = world.gather("the programs that are traced", dict(programs))
    ranks = by_value(tuple(own.items()) for own in gathered)
    if len(ranks) == 1:
        return
    usual = max(ranks, key=lambda own: len(ranks[own]))  # of several the one with the lowest rank
    first, said = dict(usual), []
    for own, those in ranks.items():
        if own != usual:
            other = dict(own)
            names = [name for name in {**first, **other} if other.get(name) != first.get(name)]
            said.append(f"on {who(those, world.hosts)} {enumerated(names)} compute something else")
    raise UsageError(
        f"{'; '.join(said)} than on {who(ranks[usual], world.hosts)}. Give all nodes the same code and "
        f"packages: compare `git status` and `pip freeze`. Nor may a layer depend on the process it is in"
    )


def by_value(values: Iterable[T]) -> dict[T, list[int]]:
    """The ranks that have each of these values, which are in rank order."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def who(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks with the nodes that they are on: "ranks 0, 1 (n0, n1)"."""
    nodes = [*dict.fromkeys(hosts[rank] for rank in ranks)]
    return f"rank{'s' * (len(ranks) > 1)} {enumerated(ranks)} ({enumerated(nodes)})"


def enumerated(things: Sequence[object]) -> str:
    """The first of them, and how many more there are."""
    more = len(things) - MOST_NAMED
    return ", ".join(map(str, things[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
