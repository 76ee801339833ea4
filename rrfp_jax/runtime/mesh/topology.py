"""The mesh a user asks for: which process has which of its stages, on which devices; who sends to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import jax

from rrfp_jax.core.schedules import Schedule
from rrfp_jax.core.tasks import SHAPES, Placement, Shape
from rrfp_jax.errors import UsageError, refusing
from rrfp_jax.fields import check_fields, numbered, says_its_arguments, shown
from rrfp_jax.runtime._jax import cpu_devices_asked_by, first_use, in_use, provide_cpu_devices
from rrfp_jax.runtime.mesh.stage_mesh import StageMesh, VirtualStage, WidthChanges
from rrfp_jax.runtime.run.stacks import first_used
from rrfp_jax.runtime.run.world import World

MOST = 2**16
"""Devices, and virtual stages, of a mesh: more than anybody has, and few enough to be looked through."""


def taking_turns(devices: Mapping[int, Sequence[jax.Device]]) -> dict[int, jax.Device]:
    """By stage the device that stands for its own and those of all stages that share any of them."""
    first: dict[int, jax.Device] = {}
    for stage, own in devices.items():
        first[stage] = own[0]
        met = {first[other] for other in first if not set(devices[other]).isdisjoint(own)}
        first |= {other: own[0] for other, device in first.items() if device in met}
    return first


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the stages of a mesh are.

    A *stage replica* is a stage of one replica of the model, number `replica * stages + stage`; without data
    parallelism, stage replicas are stages. What the runtime numbers by stage is numbered by stage replica.
    """

    world: World
    widths: Sequence[int]  # by stage, how many devices share its tensors
    groups: Sequence[Sequence[int]]  # by stage replica, ranks in the order of their devices
    stage_meshes: Mapping[int, StageMesh]  # by stage replica of this process
    homes: Mapping[int, StageMesh] = field(default_factory=dict)  # by stage, of all replicas if several
    shard_optimizer: bool = False  # replicas share the optimizer's state

    @cached_property
    def stages(self) -> int:
        return len(self.widths)

    @cached_property
    def replicas(self) -> int:
        return len(self.groups) // self.stages

    @cached_property
    def devices(self) -> Mapping[int, Sequence[jax.Device]]:
        """By stage replica of this process, its devices here."""
        return {number: stage_mesh.own for number, stage_mesh in self.stage_meshes.items()}

    @cached_property
    def group(self) -> Sequence[int]:
        """The ranks that share this process's stage replicas, its own among them."""
        return self.groups[next(iter(self.stage_meshes))]

    @cached_property
    def grouped(self) -> bool:
        """Whether several processes share a stage."""
        return any(len(ranks) > 1 for ranks in self.groups)

    @cached_property
    def crossed(self) -> bool:
        """Whether a process has several stages, and another one replicas of one of them."""
        ranks = [{*chain.from_iterable(self.groups[stage :: self.stages])} for stage in range(self.stages)]
        stages = Counter(chain.from_iterable(ranks))
        return any(len(own) > 1 and any(stages[rank] > 1 for rank in own) for own in ranks)

    @cached_property
    def member(self) -> int:
        """This process's place in its group."""
        return self.group.index(self.world.rank)

    @cached_property
    def reported(self) -> Collection[int]:
        """The stage replicas of which this process tells the others what all of their group know."""
        return self.stage_meshes.keys() if self.member == 0 else ()

    @cached_property
    def receivers(self) -> Sequence[Sequence[int]]:
        """By stage replica, the ranks to which this process sends what is for it.

        Each rank of a stage replica gets it from one rank of the sending one: from its like if there are
        equally many, else either some send to several, or some to none.
        """
        mine, own = self.member, len(self.group)
        return [[r for i, r in enumerate(group) if i * own // len(group) == mine] for group in self.groups]

    def virtual_stages(self, placement: Placement, chunks: list[list[range]]) -> list[list[VirtualStage]]:
        """By stage, of all processes, the virtual stages with the layers of each chunk."""
        widths = [self.widths[placement.place(v)[0]] for v in range(placement.last + 1)]

        def virtual_stage(stage: int, chunk: int) -> VirtualStage:
            v = placement.virtual_stage(stage, chunk)
            before, after = widths[max(v - 1, 0)], widths[min(v + 1, placement.last)]
            changes = WidthChanges(before != widths[v], after != widths[v])
            return VirtualStage(chunks[stage][chunk], widths[v], changes)

        return [[virtual_stage(stage, i) for i in range(len(own))] for stage, own in enumerate(chunks)]

    def place(self, stage_replica: int) -> tuple[int, int]:
        """Replica and stage."""
        return divmod(stage_replica, self.stages)

    def replicas_of(self, stage: int) -> list[int]:
        """This process's stage replicas of a stage."""
        return [number for number in self.stage_meshes if self.place(number)[1] == stage]

    def stages_of(self, replica: int) -> list[int]:
        """This process's stage replicas of a replica of the model."""
        return [number for number in self.stage_meshes if self.place(number)[0] == replica]

    def name(self, stage_replica: int) -> str:
        """A stage replica as messages name it; the first replica's as if there were no other."""
        replica, stage = self.place(stage_replica)
        return f"stage {stage} of replica {replica}" if replica else f"stage {stage}"

    def count_of(self, microbatches: int) -> int:
        """How many of a step's microbatches each replica gets; UsageError if that is not equally many."""
        if microbatches % self.replicas:
            raise UsageError(
                f"a step of {microbatches} microbatches for dp={self.replicas} replicas: each takes equally "
                f"many, so give a multiple of {self.replicas}"
            )
        return microbatches // self.replicas


_ELSEWHERE = {
    **dict.fromkeys(["stages", "num_stages", "pipeline", "n_stages"], "stages are pp: Mesh(pp=4)"),
    **dict.fromkeys(["data_parallel", "replicas"], "replicas of the whole pipeline are dp: Mesh(pp=4, dp=2)"),
    **dict.fromkeys(["tensor_parallel", "model_parallel"], "devices of a stage are tp: Mesh(pp=4, tp=2)"),
    "devices": "devices are numbered stage by stage: give their numbers, Mesh(pp=4, tp=2, dp=1)",
    "num_chunks": "virtual stages of each stage are chunks: Mesh(pp=4, chunks=2)",
}


@says_its_arguments(_ELSEWHERE)
@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Pipeline, tensor and data parallelism: how many devices there are, and which stage each belongs to.

    Attributes:
        pp: pipeline parallelism, the number of stages. All processes have equally many devices: those of
            several stages, or an equal part of one stage's.
        tp: tensor parallelism, the number of devices that share a stage's tensors; one number, or one per
            stage.
        dp: data parallelism, the number of replicas of the pipeline; each takes every dp-th microbatch of a
            step. Devices are numbered stage by stage, within a stage replica by replica.
        chunks: model chunks (virtual stages) of each stage; None for what the schedule needs.
        shape: placement of several chunks: "looped" (stage 0 to the last, repeatedly) or "v" (forth and
            back). Without `chunks` the schedule decides.
        shard_optimizer: shard the optimizer's state over replicas (ZeRO-1) instead of replicating it.
        share_devices: let several stages run on one device if there are fewer devices than stages. They take
            turns, so this is for tests, not for speed.

    Raises:
        UsageError: fewer than one stage, device or chunk, more than 65,536 of them, or an unknown shape.
    """

    pp: int = 1
    tp: int | tuple[int, ...] = 1
    dp: int = 1
    chunks: int | None = None
    shape: Shape = "looped"
    share_devices: bool = False
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tp, (list, tuple)):  # command lines make a tuple of one number, too
            object.__setattr__(self, "tp", self.tp[0] if len(self.tp) == 1 else tuple(self.tp))
        counts = {
            "pp": f"a pipeline needs a whole number of stages, at least one stage, at most {MOST}",
            "tp": "a stage has a whole number of devices, at least one",
            "dp": "there is a whole number of replicas, at least one",
            "chunks": "every stage has a whole number of them, at least one",
        }
        for name, wanted in counts.items():
            value = getattr(self, name)
            several = value if name == "tp" and isinstance(value, tuple) else (value,)
            if not (name == "chunks" and value is None) and not all(map(_is_count, several)):
                raise UsageError(f"Mesh({name}={shown(value)}): {wanted}")
        if isinstance(self.tp, tuple) and len(self.tp) != self.pp:
            raise UsageError(f"Mesh(pp={self.pp}, tp={self.tp!r}): give one number, or one for each stage")
        if self.shape not in SHAPES:
            raise UsageError(f"Mesh(shape={self.shape!r}): choose 'looped' or 'v'")
        check_fields(self)
        for what, count in (("devices", self.devices), ("virtual stages", self.pp * (self.chunks or 1))):
            if count > MOST:
                raise UsageError(f"{self._named} has {count} {what}: give at most {MOST}")

    def placement(self, schedule: Schedule) -> Placement:
        """Which stage has which virtual stages; refuses an order for another number of stages."""
        if self.chunks is not None:
            return Placement(self.pp, self.chunks, self.shape)
        with refusing(f"Mesh(pp={self.pp}): "):
            placement = schedule.placement_for(self.pp)
        if self.shape == "v" and placement.shape != "v":
            raise UsageError(f"Mesh(pp={self.pp}, shape='v'): one chunk a stage has no shape; give chunks=2")
        return placement

    @cached_property
    def _first_devices(self) -> list[int]:
        """The first device of each stage of one replica, and at the end how many devices the replica has."""
        return [0, *accumulate(self.widths)]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """By stage, how many devices share its tensors."""
        return self.tp if isinstance(self.tp, tuple) else (self.tp,) * self.pp

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.dp * sum(self.widths)

    def lay_out(self, world: World) -> Layout:
        """Give each stage of this process of a run its devices.

        Without accelerators, asks JAX for as many virtual CPU devices as the process needs.

        Raises:
            UsageError: fewer devices than needed, or devices that cannot be shared out evenly.
        """
        groups = self.groups(world.size)
        share = self.devices // world.size
        of_rank = {world.rank: self._own_devices(share)}
        if max(map(len, groups)) > 1 or self.dp > 1:
            others = [r for r in range(world.size) if r != world.rank]
            of_rank |= {r: self._devices_elsewhere(r, share) for r in others}
        stage_replicas = [[s for s, group in enumerate(groups) if r in group] for r in range(world.size)]
        own = {stage_replica % self.pp for stage_replica in stage_replicas[world.rank]}
        world.run_stages([self._name(one) for one in stage_replicas], own)
        return self._layout(world, groups, stage_replicas[world.rank], of_rank)

    def lay_out_on(self, of_rank: Sequence[Sequence[jax.Device]], stages: Collection[int]) -> Layout:
        """All replicas of these stages as if they were this process's, on devices that may be absent.

        `of_rank` has by process its devices, as many as `devices_of_process` says.
        """
        groups, share = self.groups(len(of_rank)), self.devices // len(of_rank)
        own = [number for number in range(self.pp * self.dp) if number % self.pp in stages]
        devices = {rank: self._shared_out(found, share) for rank, found in enumerate(of_rank)}
        return self._layout(World(), groups, own, devices)

    def devices_of_process(self, processes: int) -> int:
        """How many devices each of so many processes needs."""
        share = self.devices // processes
        return self._at_once(share) if self.share_devices else share

    def _layout(
        self, world: World, groups: list[list[int]], own: list[int], of_rank: dict[int, list[jax.Device]]
    ) -> Layout:
        share, widths, dp = len(of_rank[world.rank]), self.widths, self.dp

        def stage_mesh(stage_replica: int, replicas: int = 1) -> StageMesh:
            first, count = self._first_device(stage_replica), replicas * widths[stage_replica % self.pp]
            own = (of_rank[i // share][i % share] for i in range(first, first + count))
            return StageMesh((*own,), replicas)

        return Layout(
            world=world,
            widths=widths,
            groups=groups,
            stage_meshes={number: stage_mesh(number) for number in own},
            shard_optimizer=self.shard_optimizer and dp > 1,
            homes={s: stage_mesh(s, dp) for s in dict.fromkeys(n % self.pp for n in own) if dp > 1},
        )

    def groups(self, processes: int) -> list[list[int]]:
        """By stage replica, the ranks of its processes in the order of their devices, if there are so many.

        Refuses a number of processes that cannot share the devices evenly.
        """
        devices = self.devices
        runs = [(self._first_device(one), self.widths[one % self.pp]) for one in range(self.pp * self.dp)]

        def fits(number: int) -> bool:
            """Whether every process gets whole stage replicas, or a part of one alone."""
            share, rest = divmod(devices, number)
            whole = (first // share == (first + count - 1) // share for first, count in runs)
            parts = (first % share == 0 and count % share == 0 for first, count in runs)
            return not rest and all(one or other for one, other in zip(whole, parts, strict=True))

        if processes > devices or not fits(processes):
            divisors = (number for number in range(devices, 0, -1) if devices % number == 0)
            *most, least = [str(number) for number in divisors if fits(number)]
            choices = f"{', '.join(most)} or {least}" if most else least
            parts = "devices: whole stages, or an equal part of one" if max(self.widths) > 1 else "stages"
            raise UsageError(
                f"{self._named} on {processes} processes: every process takes equally many {parts}, so "
                f"start {choices} processes"
            )
        share = devices // processes
        return [list(range(first // share, (first + count - 1) // share + 1)) for first, count in runs]

    def _first_device(self, stage_replica: int) -> int:
        """Replicas of a stage are neighbours: they exchange gradients, stages only activations."""
        replica, stage = divmod(stage_replica, self.pp)
        return self.dp * self._first_devices[stage] + replica * self.widths[stage]

    @property
    def _named(self) -> str:
        sizes = {"pp": self.pp, "tp": self.tp, "dp": self.dp}
        return f"Mesh({', '.join(f'{name}={n}' for name, n in sizes.items() if name == 'pp' or n != 1)})"

    def _name(self, stage_replicas: Sequence[int]) -> str:
        """Stage replicas as messages name them: "stage 2", "stages 2-3", "stage 2 of replica 1"."""
        stages = sorted({number % self.pp for number in stage_replicas})
        replicas = sorted({number // self.pp for number in stage_replicas})
        if len(stage_replicas) < len(stages) * len(replicas):
            return ", ".join(self._name([stage_replica]) for stage_replica in stage_replicas)
        named = numbered("stage", stages)
        return named if self.dp == 1 else f"{named} of {numbered('replica', replicas)}"

    def _own_devices(self, count: int) -> list[jax.Device]:
        """The devices of this process's stages, in the order of the mesh."""
        was_used = in_use()
        if not self.share_devices:
            provide_cpu_devices(count)
        devices = _local_devices()
        if len(devices) < count and not self.share_devices:
            cause = "use fewer stages, or more processes"
            if devices[0].platform == "cpu" and was_used:
                cause = (
                    "JAX was used before the mesh was made, so no virtual CPU devices could be added: "
                    f"{first_used(first_use())}; call jax.config.update('jax_num_cpu_devices', {count}) "
                    f"before that (in a notebook: restart the kernel first)"
                )
            elif devices[0].platform == "cpu":
                cause = f"{cpu_devices_asked_by()} asks for so many: ask for {count}"
            if len(devices) >= self._at_once(count):
                cause += f", or let stages share a device: {self._named[:-1]}, share_devices=True)"
            raise UsageError(
                f"{self._named} needs {count} devices and this process has {len(devices)} "
                f"({devices[0].platform}): {cause}"
            )
        if len(devices) < (at_once := self._at_once(count)):
            raise UsageError(
                f"{self._named[:-1]}, share_devices=True): stages may share devices, but one stage needs "
                f"{at_once} different ones, and this process has {len(devices)} ({devices[0].platform})"
            )
        return self._shared_out(devices, count)

    def _devices_elsewhere(self, rank: int, count: int) -> list[jax.Device]:
        """The devices of another process's stages, in the order of the mesh."""
        found = (device for device in jax.devices() if device.process_index == rank)
        devices = sorted(found, key=lambda device: device.id)  # as that process sees them itself
        least = self._at_once(count) if self.share_devices else count
        if len(devices) < least:
            raise UsageError(f"{self._named} needs {least} devices of rank {rank}, which has {len(devices)}")
        return self._shared_out(devices, count)

    def _at_once(self, count: int) -> int:
        """How many of a process's `count` devices one program may run on."""
        return min(max(self.widths) * self.dp, count)

    def _shared_out(self, devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
        """A process's devices in the order of the mesh, again and again if stages share them."""
        if len(devices) >= count:
            return list(devices[:count])
        usable = len(devices) - len(devices) % self._at_once(count)
        return [devices[number % usable] for number in range(count)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST


def _local_devices() -> Sequence[jax.Device]:
    """Devices of this process; refuses JAX_PLATFORMS that asks for some that are not there."""
    asked: str = getattr(jax.config, "jax_platforms") or ""  # noqa: B009 (JAX's types lack it)
    try:
        return list(jax.local_devices())
    except (RuntimeError, AssertionError) as error:  # the latter without a word
        if not asked or "cpu" in asked.split(","):
            raise
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise UsageError(
            f"JAX_PLATFORMS={asked}: JAX finds no such device here{reason}; unset it to train on what there "
            f"is, or install JAX for these devices, and their driver"
        ) from None
