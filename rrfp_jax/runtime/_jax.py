"""Every use of JAX internals, in one place. Tried on jax 0.10.2 (Python 3.11) and 0.12.0.1 (3.12).

There is one more in `run/coordinator.py`, which is a program of its own.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import api, compiler, config, distributed, source_info_util, xla_bridge
from jax._src.interpreters import partial_eval
from jax._src.lax.lax import _convert_element_type
from jax._src.lib import _jax, xla_client  # type: ignore[attr-defined]
from jax.experimental import serialize_executable
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.extend.core.primitives import jit_p
from jax.sharding import SingleDeviceSharding

from rrfp_jax.environment import ENVIRONMENT

flattree: Any = sys.modules.get("jax._src.flattree")  # from jax 0.12 on

INLINE: Any = api.Inline.JAX_EARLY if hasattr(api, "Inline") else True  # from jax 0.11 on

LONGEST_SECONDS = 10**6
"""JAX counts milliseconds in 32 bits."""

Settings: TypeAlias = Sequence[tuple[Any, Any]]
"""States of JAX's configuration, each with its value on a thread."""


def settings_here() -> Settings:
    """JAX's settings that hold on this thread only, as within `with jax.default_matmul_precision(...)`."""
    found = [(state, state.get_local()) for state in config.config_states.values()]
    return [(state, value) for state, value in found if value is not config.config_ext.unset]


def adopt(settings: Settings) -> Settings:
    """Let settings of another thread hold on this one, from now on; gives those that did."""
    before = [(state, state.get_local()) for state, _ in settings]
    for state, value in settings:
        state.set_local(value)
    return before


def calls_python(lowered: jax.stages.Lowered) -> bool:
    """Whether a program has more to it than its text tells: Python functions, and what only they refer to."""
    arguments = lowered._lowering.compile_args  # type: ignore[attr-defined]
    return bool(arguments["host_callbacks"] or arguments["keepalive"])


def load_for(serialized: Any, made_for: Sequence[int], devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """A serialised program on other devices than it was compiled for, as many and of the same kind.

    `serialized` is what `serialize_executable.serialize` gives. `devices` of this process take the places of
    those with the ids `made_for`. JAX takes programs from its own cache for other devices in the same way.
    """
    client, count = devices[0].client, len(devices)
    ids = np.array([[device.id for device in devices]])
    options = compiler.get_compile_options(1, count, ids, backend=client)

    class Mover(serialize_executable._JaxPjrtUnpickler):  # type: ignore[misc]
        """Reads the program as if it had been written on these devices."""

        def persistent_load(self, pid: Any) -> Any:
            if pid[0] != "exec":
                return super().persistent_load(pid)  # type: ignore[no-untyped-call]
            load = self.backend.deserialize_executable
            return load(pid[1], executable_devices=self.execution_devices, compile_options=options)

    content, inputs, outputs = serialized
    mover = Mover(io.BytesIO(content), client, devices)  # type: ignore[no-untyped-call]
    mover.devices_by_id = dict(zip(made_for, devices, strict=True))
    executable, arguments, no_keywords = mover.load()
    info = inputs.unflatten(arguments)
    return jax.stages.Compiled(executable.load(), [], info, outputs, no_kwargs=no_keywords)


def call(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """What a program gives; inside a trace its equations are taken over, instead of traced once more."""
    given, made = len(closed.jaxpr.invars), len(closed.jaxpr.outvars)
    # Made here, as some of it depends on the context: the mesh, and settings of the compiler.
    like = jax.make_jaxpr(jax.jit(lambda a: a + 1))(0).eqns[0].params
    counts = {"in_shardings": given, "in_layouts": given, "donated_invars": given}
    counts |= {"out_shardings": made, "out_layouts": made}
    many = {name: like[name] * count for name, count in counts.items()}
    return jit_p.bind(*args, **{**like, **many, "jaxpr": closed, "inline": INLINE})  # type: ignore[no-any-return]


def live_part(closed: ClosedJaxpr, outputs: Sequence[bool]) -> tuple[ClosedJaxpr, list[int]]:
    """The program reduced to the chosen outputs, inside loops too; the indices of the inputs left."""
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(outputs))
    return ClosedJaxpr(jaxpr, closed.consts), [i for i, live in enumerate(used) if live]


def line_of(equation: JaxprEqn) -> str:
    """Where in a user's code an equation is from, as "file.py, line 3"; empty if JAX does not know."""
    frame = source_info_util.user_frame(equation.source_info.traceback)
    return "" if frame is None else f"{os.path.basename(frame.file_name)}, line {frame.start_line}"


def cast_like(value: Any, spec: Any) -> jax.Array:
    """A value with the dtype of a spec, weakly typed if the spec is, which no public function gives."""
    weak = getattr(spec, "weak_type", False)
    return _convert_element_type(jnp.asarray(value), spec.dtype, weak_type=weak)  # type: ignore[no-any-return]


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's inputs are constants of its body, how many are carried; the rest is scanned."""
    if "num_consts" in equation.params:  # jax 0.10
        return equation.params["num_consts"], equation.params["num_carry"]
    constants, carried, _ = equation.params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))


def scan_like(
    equation: JaxprEqn, body: ClosedJaxpr, operands: Sequence[Sequence[Any]], outputs: Sequence[Var]
) -> JaxprEqn:
    """A scan of the same length and direction, of a body (constants, carried, scanned) -> outputs."""
    constants, carried, scanned = map(list, operands)
    if "num_consts" in equation.params:  # jax 0.10
        layout = {"num_consts": len(constants), "num_carry": len(carried)}
    else:
        stacked = len(outputs) - len(carried)
        parts = [flattree.nones(len(part)) for part in (constants, carried, scanned)]
        out = parts[1], flattree.nones(stacked)
        layout = {"ft_in": flattree.pack(tuple(parts)), "ft_out": flattree.pack(out)}
    params = {**equation.params, "jaxpr": body, **layout}
    read = [*constants, *carried, *scanned]
    return equation.replace(invars=read, outvars=list(outputs), params=params)  # type: ignore[no-any-return]


def provide_cpu_devices(count: int) -> None:
    """Ask for `count` virtual CPU devices if JAX has no backend yet and nobody else has asked for some."""
    if not in_use() and not cpu_devices_asked_by():
        jax.config.update("jax_num_cpu_devices", count)


def cpu_devices_asked_by() -> str:
    """The setting that asks for a number of virtual CPU devices; "" if none does."""
    flag = "xla_force_host_platform_device_count"
    if flag in ENVIRONMENT.get("XLA_FLAGS", ""):
        return f"XLA_FLAGS=--{flag}"
    wanted: int = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009 (JAX's types lack it)
    return "jax_num_cpu_devices (JAX_NUM_CPU_DEVICES in the environment)" if wanted > 0 else ""


def place_in_run() -> tuple[int, int] | None:
    """(rank, number of processes) if `jax.distributed` has been initialised, else None."""
    state = distributed.global_state
    return None if state.client is None else (state.process_id, state.num_processes)


def join_run(coordinator: str, processes: int, rank: int) -> None:
    """`jax.distributed.initialize`, such that the death of another process is no death sentence for this one.

    Whatever proxy the environment names, the coordinator is called directly. JAX looks for no cluster: in a
    SLURM step it would let a process use the GPU that has its local rank among those that it sees, which is
    none where each task sees its own only. Raises RuntimeError if the service refuses this process.
    """
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    jax.config.update("jax_check_proxy_envs", False)  # it would warn of what the next line sees to
    # A forked child that ends must not shut down what is its parent's, in which it would hang.
    os.register_at_fork(after_in_child=partial(atexit.unregister, api.clean_up))
    start_service = _jax.get_distributed_runtime_service  # which rank 0 would call
    _jax.get_distributed_runtime_service = lambda *args, **kwargs: None
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=LONGEST_SECONDS,  # at which JAX aborts; `JoinWatchdog` says why
            heartbeat_timeout_seconds=LONGEST_SECONDS,  # as in `coordinator.py`
        )
    finally:
        _jax.get_distributed_runtime_service = start_service


def exchange_at(address: str) -> None:
    """Have CPU processes exchange at this address; by itself gloo looks up the machine's own name."""
    _jax.make_gloo_tcp_collectives = partial(_make_collectives, hostname=address)


_make_collectives = _jax.make_gloo_tcp_collectives


def leave_run() -> None:
    """`jax.distributed.shutdown`, which waits for nobody here; the others may be gone."""
    with suppress(RuntimeError):
        distributed.shutdown()


def in_use() -> bool:
    """Whether a backend exists, after which no run can be joined."""
    return bool(xla_bridge.backends_are_initialized())


def first_use() -> Sequence[tuple[str, int, str]] | None:
    """The stack of the first use of JAX, innermost first: file, line, function. None if nobody looked on."""
    return _first_use[0] if _first_use else None


def _noting_first_use(platform: str) -> Any:
    """In place of `xla_bridge._init_backend` until it has been called."""
    xla_bridge._init_backend = _init_backend
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    _first_use.append([(frame.filename, frame.lineno or 0, frame.name) for frame in stack])
    return _init_backend(platform)


_first_use: list[Sequence[tuple[str, int, str]]] = []
_init_backend = xla_bridge._init_backend
if not in_use():
    xla_bridge._init_backend = _noting_first_use


def coordinator_host() -> str:
    """Name or address of the machine with the coordination service."""
    return str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")


def key_value_store() -> Any:
    """The client of the run's key-value store."""
    return distributed.global_state.client


def shards_of(array: jax.Array) -> Sequence[jax.Array]:
    """What this process's devices have of an array: `addressable_shards` at a fraction of its cost."""
    return array._arrays  # type: ignore[no-any-return, attr-defined]


class DeviceCopier:
    """`jax.device_put` of arrays on one device each to other devices in turn, at a tenth of its cost."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = [xla_client.DeviceList((device,)) for device in devices]
        self._shardings = [SingleDeviceSharding(device) for device in devices]

    def __call__(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Begin the copies; the arrays that will hold them, ready later."""
        count = len(arrays)
        turns = -(-count // len(self._devices))
        reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT] * count
        copy = xla_client.batched_copy_array_to_devices_with_sharding
        devices, shardings = (self._devices * turns)[:count], (self._shardings * turns)[:count]
        return copy(list(arrays), devices, shardings, reuse)  # type: ignore[no-any-return]


class HostCopier:
    """`jax.device_put` of NumPy arrays to one device, at a tenth of its cost on the host."""

    def __init__(self, device: jax.Device, as_sent: Callable[[Any], Any] = lambda value: value) -> None:
        self._device, self._sharding, self._as_sent = device, SingleDeviceSharding(device), as_sent
        self._known: dict[Any, Any] = {}  # what JAX makes of arrays of a shape and dtype

    def __call__(self, values: Sequence[Any]) -> Sequence[jax.Array]:
        """Begin the copies. The first of a kind, and what is no NumPy array, goes the usual way, as sent."""
        put, copies = xla_client.batched_device_put, []
        with config.explicit_device_put_scope():  # as it tells guards against transfers that nobody meant
            for value in values:
                kind = (value.shape, value.dtype) if type(value) is np.ndarray else None
                if (known := self._known.get(kind)) is not None:
                    copies.append(put(known, self._sharding, [value], [self._device]))
                    continue
                copies.append(there := jax.device_put(self._as_sent(value), self._sharding))
                if kind is not None and there.dtype == value.dtype:
                    self._known[kind] = there.aval
        return copies


def is_on_host(array: jax.Array) -> bool:
    """Whether NumPy can read an array where it is."""
    return bool(next(iter(array.devices())).platform == "cpu")


def fetch(array: jax.Array) -> None:
    """Begin to copy an array to the host, if it is not there: JAX would copy it all the same, for nobody."""
    if not is_on_host(array):
        array.copy_to_host_async()


def on_host(tree: Any) -> Any:
    """`jax.device_get` of arrays, at a fifth of its cost on the host; likewise no guard is against it."""
    with jax.transfer_guard_device_to_host("allow"):
        for leaf in jax.tree.leaves(tree):
            fetch(leaf)
        return jax.tree.map(np.asarray, tree)


def address_of(array: jax.Array) -> int:
    """Where an array on one device begins in its memory; what lies there may not be computed yet."""
    return int(array.unsafe_buffer_pointer())  # type: ignore[attr-defined]
