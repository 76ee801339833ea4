"""What has changed in a run's configuration since its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MISSING = "nothing"


def differences(before: Any, now: Any) -> list[str]:
    """The fields in which two configs differ, such as "learning_rate: 0.006 -> 0.001".

    Args:
        before, now: as plain data; what JSON does not keep, such as tuples, may differ in form.
    """
    old, new = dict(_flat(_plain(before))), dict(_flat(_plain(now)))
    names = [*new, *(name for name in old if name not in new)]
    changed = [name for name in names if old.get(name, MISSING) != new.get(name, MISSING)]
    return [f"{name}: {_text(old.get(name, MISSING))} -> {_text(new.get(name, MISSING))}" for name in changed]


def _plain(config: Any) -> Any:
    return json.loads(json.dumps(config, default=str))


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names and values of all leaves of nested dicts."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}.{name}" if prefix else name)
    elif prefix:
        yield prefix, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
