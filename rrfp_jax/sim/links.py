"""How outputs get from one stage to another.

parallel      each transfer begins when its task ends, beside all others
serial        each directed link carries one transfer at a time, in the order in which tasks end
synchronous   send and receive as in classic 1F1B implementations (see `engine.py`)
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Links: TypeAlias = Literal["parallel", "serial", "synchronous"]
