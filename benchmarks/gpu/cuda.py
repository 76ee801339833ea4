"""The few calls of NVIDIA's driver library that let two processes share device memory, through ctypes.

Names and meanings are those of the CUDA driver API, sections "Memory Management" and "Primary Context".
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from benchmarks.gpu.findings import Unavailable

LAZY_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    """A CUipcMemHandle: names an allocation of another process."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class CudaError(RuntimeError):
    """A call of the driver failed; the message names both."""


class Driver:
    """The driver library with the primary context of a device, which is the one that JAX uses.

    Args:
        ordinal: of the device, among those visible.

    Raises:
        Unavailable: there is no such library. CudaError: it refuses.
    """

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unavailable(f"no NVIDIA driver library here: {error}") from None
        device, context = c_int(), c_void_p()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(device), c_int(ordinal))
        self._call("cuDevicePrimaryCtxRetain", byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = c_char_p()
            self._library.cuGetErrorName(c_int(status), byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown').decode()} ({status})")

    def allocation(self, address: int) -> tuple[int, int]:
        """Base and bytes of the allocation that an address lies in."""
        base, size = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return base.value, size.value

    def allocate(self, size: int) -> int:
        """Fresh device memory, never given back: this process is short."""
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def share(self, base: int) -> bytes:
        """A handle that other processes can open, of a whole allocation."""
        handle = Handle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """The address here of another process's allocation."""
        address = c_uint64()
        named = Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), named, c_uint(LAZY_PEER_ACCESS))
        return address.value

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy on the device, and wait for the end of it."""
        self._call("cuMemcpyDtoD_v2", c_uint64(to), c_uint64(source), c_size_t(size))
        self._call("cuCtxSynchronize")
