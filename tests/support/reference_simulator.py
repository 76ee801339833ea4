"""A second simulator, to hold the first to: no event heap, no core, its own rules and its own BF.

It goes from one time to the next at which anything ends or arrives, looking at all stages each time.
"""

import math
from dataclasses import dataclass, field


@dataclass
class Stage:
    free: float = 0.0
    ready: set = field(default_factory=set)  # (kind, chunk, microbatch), kinds as letters
    begun: set = field(default_factory=set)  # microbatches with a forward
    open: dict = field(default_factory=dict)  # releasing tasks to go, by microbatch
    turn: dict = field(default_factory=dict)  # next gradient to add, by chunk
    parked: set = field(default_factory=set)
    direction: str = "B"
    order: list = field(default_factory=list)  # what it ran
    times: list = field(default_factory=list)  # (start, end)


@dataclass
class Reference:
    """One step. `chain` lists the (stage, chunk) of every virtual stage in order."""

    chain: list
    microbatches: int
    policy: object
    duration: object
    transfer: object
    limit: float = math.inf
    spare: int = 2

    def run(self):
        """The stages, each with what it ran and when."""
        count = 1 + max(stage for stage, _ in self.chain)
        self.chunks = len(self.chain) // count
        self.stages = [Stage(turn=dict.fromkeys(range(self.chunks), 0)) for _ in range(count)]
        first, chunk = self.chain[0]
        self.stages[first].ready = {("F", chunk, j) for j in range(self.microbatches)}
        self.coming = []  # (time, stage, task)
        now = 0.0
        while True:
            for at, stage, task in [c for c in self.coming if c[0] <= now]:
                self.stages[stage].ready.add(task)
                self.coming.remove((at, stage, task))
            ran = False
            for index, stage in enumerate(self.stages):
                if stage.free <= now and (task := self.choose(index, stage)) is not None:
                    self.dispatch(index, stage, task, now)
                    ran = True
            if ran:
                continue  # what takes no time ends at once
            later = [at for at, _, _ in self.coming] + [s.free for s in self.stages]
            if not any(at > now for at in later):
                return self.stages
            now = min(at for at in later if at > now)

    def split(self, stage, chunk, microbatch):
        if self.policy == "bfw":
            return (stage, chunk) != self.chain[0]
        return self.policy != "bf" and ("W", chunk, microbatch) in self.policy[stage]

    def choose(self, index, stage):
        if self.policy not in ("bf", "bfw"):
            left = self.policy[index][len(stage.order) :]
            return left[0] if left and left[0] in stage.ready else None
        directions = "BF" if stage.direction == "B" else "FB"
        for direction in directions + "W":
            kinds = "BI" if direction == "B" else direction
            tasks = [t for t in stage.ready if t[0] in kinds and self.runnable(stage, t)]
            if tasks:
                sign = 1 if direction == "F" else -1
                task = min(tasks, key=lambda t: (sign * t[1], t[2]))
                if direction == "W":
                    stage.direction = "B"
                elif direction == stage.direction:
                    stage.direction = "FB"[direction == "F"]
                return task
        return None

    def runnable(self, stage, task):
        kind, chunk, j = task
        if kind == "F":
            if chunk > 0:
                return True
            lower = any(k not in stage.begun for k in range(j))
            return len(stage.open) + 1 + lower <= self.limit
        return kind == "I" or stage.turn[chunk] == j or len(stage.parked) < self.spare

    def dispatch(self, index, stage, task, now):
        kind, chunk, j = task
        end = now + self.duration(index, task)
        stage.ready.remove(task)
        stage.free = end
        stage.order.append(task)
        stage.times.append((now, end))
        if kind == "F" and j not in stage.begun:
            stage.begun.add(j)
            stage.open[j] = self.chunks
        if kind in "BW":
            stage.open[j] -= 1
            if stage.open[j] == 0:
                del stage.open[j]
            stage.parked.add((chunk, j))
            while (chunk, stage.turn[chunk]) in stage.parked:
                stage.parked.remove((chunk, stage.turn[chunk]))
                stage.turn[chunk] += 1
        v = self.chain.index((index, chunk))
        if kind == "F" and v == len(self.chain) - 1:
            stage.ready.add(("I" if self.split(index, chunk, j) else "B", chunk, j))
        if kind == "I":
            stage.ready.add(("W", chunk, j))
        to = v + 1 if kind == "F" else v - 1
        if kind != "W" and 0 <= to < len(self.chain):
            there, chunk = self.chain[to]
            name = "F" if kind == "F" else "I" if self.split(there, chunk, j) else "B"
            at = end + self.transfer(index, task) if there != index else end
            self.coming.append((at, there, (name, chunk, j)))
