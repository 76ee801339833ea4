"""The cheapest cut between a source and a sink (Dinic's algorithm)."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import TypeAlias

Node: TypeAlias = Hashable

UNCUTTABLE = 1 << 60
"""Capacity of an edge that no cut may go through; far more than all others together."""

SOURCE, SINK = "source", "sink"


class Network:
    """Edges with whole-number capacities between nodes of any hashable kind."""

    def __init__(self) -> None:
        self._left: dict[Node, dict[Node, int]] = {SOURCE: {}, SINK: {}}

    def edge(self, tail: Node, head: Node, capacity: int = UNCUTTABLE) -> None:
        """Add an edge; if it is there already, the capacities add up."""
        ahead = self._left.setdefault(tail, {})
        ahead[head] = ahead.get(head, 0) + capacity
        self._left.setdefault(head, {}).setdefault(tail, 0)

    def sink_side(self) -> set[Node]:
        """The nodes on the sink's side of a minimum cut: of all such cuts, the one nearest to the sink.

        Raises:
            ValueError: every cut goes through an uncuttable edge.
        """
        while levels := self._levels():
            flow = self._push(levels)
            if flow > UNCUTTABLE // 2:  # finite flows before it have used up a little
                raise ValueError("no finite cut: something must be on both sides")
        side: set[Node] = {SINK}
        pending: list[Node] = [SINK]
        while pending:
            head = pending.pop()
            tails = [node for node in self._left[head] if node not in side and self._left[node][head]]
            side.update(tails)
            pending += tails
        return side

    def _levels(self) -> dict[Node, int]:
        """Distance from the source over edges with capacity left; empty if the sink is out of reach."""
        levels: dict[Node, int] = {SOURCE: 0}
        frontier: list[Node] = [SOURCE]
        while frontier and SINK not in levels:
            found: list[Node] = []
            for tail in frontier:
                for head, left in self._left[tail].items():
                    if left and head not in levels:
                        levels[head] = levels[tail] + 1
                        found.append(head)
            frontier = found
        return levels if SINK in levels else {}

    def _push(self, levels: dict[Node, int]) -> int:
        """Send what fits along shortest paths; the largest flow of one path."""
        ahead = {node: list(self._left[node]) for node in levels}
        path: list[Node] = [SOURCE]
        largest = 0
        while path:
            tail = path[-1]
            if tail == SINK:
                steps = list(pairwise(path))
                flow = min(self._left[a][b] for a, b in steps)
                largest = max(largest, flow)
                for a, b in steps:
                    self._left[a][b] -= flow
                    self._left[b][a] += flow
                path = path[: 1 + next(i for i, (a, b) in enumerate(steps) if not self._left[a][b])]
                continue
            heads = ahead[tail]
            while heads and not (self._left[tail][heads[-1]] and levels.get(heads[-1]) == levels[tail] + 1):
                heads.pop()
            if heads:
                path.append(heads[-1])
            else:
                path.pop()
                if path:
                    ahead[path[-1]].pop()
        return largest
