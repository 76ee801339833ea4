"""Settings that are arguments of a Trainer, too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from rrfp_jax.errors import UsageError
from rrfp_jax.fields import shown
from rrfp_jax.runtime.engine.settings import Settings


class Default(Enum):
    """Default of an argument that is a setting, too: tells one that is not given from one at its default."""

    DEFAULT = "as settings have it"

    def __repr__(self) -> str:
        return self.value


DEFAULT = Default.DEFAULT


def with_arguments(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Settings with a Trainer's own arguments, by name; DEFAULT for one that is not given.

    Raises:
        UsageError: a value is given both ways.
    """
    new = {}
    for name, value in given.items():
        if value is DEFAULT:
            continue
        if (own := getattr(settings, name)) != getattr(Settings, name):
            raise UsageError(f"{name}={shown(value)} beside settings with {name}={shown(own)}: give it once")
        new[name] = value
    return replace(settings, **new)
