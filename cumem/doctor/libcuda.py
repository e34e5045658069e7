"""The few questions to libcuda that the core does not ask. Opens it lazily; makes no context on a device."""

from __future__ import annotations

import ctypes

__all__ = ["LibCuda"]

_PCI_BUS_ID_BYTES = 32


class LibCuda:
    """libcuda, opened now.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self._library = ctypes.CDLL(path)

    def cuda_version(self) -> tuple[int, int] | None:
        """The newest CUDA version that the driver supports, as (major, minor)."""
        version = ctypes.c_int()
        if self._library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
        return version.value // 1000, version.value % 1000 // 10

    def initialise(self) -> str | None:
        """Makes the driver ready; the name of the error if it cannot be."""
        code = self._library.cuInit(0)
        if code == 0:
            return None
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return name.value.decode() if name.value else f"error {code}"

    def pci_bus_id(self, device: int) -> str | None:
        """A device's address on the bus as sysfs writes it, "0000:1b:00.0"."""
        handle = ctypes.c_int()
        text = ctypes.create_string_buffer(_PCI_BUS_ID_BYTES)
        if self._library.cuDeviceGet(ctypes.byref(handle), device) != 0:
            return None
        if self._library.cuDeviceGetPCIBusId(text, _PCI_BUS_ID_BYTES, handle) != 0:
            return None
        return text.value.decode().lower()
