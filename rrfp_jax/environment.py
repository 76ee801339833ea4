"""The environment of this process. No other file of the package touches `os.environ`.

What reads several variables takes a mapping, so that a launcher can ask for its ranks, and a test for itself.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

ENVIRONMENT: MutableMapping[str, str] = os.environ
"""What is changed here counts for JAX, and for the processes that this one starts."""
