"""The functions of Open MPI that the test of MPI needs, called without any other package."""

from __future__ import annotations

import ctypes
import json
from array import array
from pathlib import Path
from typing import Any


class MPI:
    """The functions of Open MPI that the test needs. If one fails, Open MPI itself prints why and ends the job."""

    def __init__(self, path: Path) -> None:
        # Open MPI's plugins look its symbols up among the global ones.
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        self.world = self.handle("comm_world")
        self.byte = self.handle("byte")
        self.call("Init", None, None)
        self.rank = self.integer("Comm_rank", self.world)
        self.size = self.integer("Comm_size", self.world)

    def handle(self, name: str) -> ctypes.c_void_p:
        """A predefined handle, which C calls MPI_COMM_WORLD, MPI_BYTE and so on."""
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.library, f"ompi_mpi_{name}")))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of MPI."""
        if code := getattr(self.library, f"MPI_{name}")(*arguments):
            raise RuntimeError(f"MPI_{name} returned {code}")

    def integer(self, name: str, *arguments: Any) -> int:
        """Call a function and return the integer that it writes to its last argument."""
        answer = ctypes.c_int()
        self.call(name, *arguments, ctypes.byref(answer))
        return answer.value

    def version(self) -> str:
        """The version string of the library."""
        text = ctypes.create_string_buffer(256)
        self.integer("Get_library_version", text)
        return text.value.decode().partition(",")[0]

    def send(self, values: array[Any], rank: int) -> None:
        """Send an array."""
        self.call("Send", place(values), length(values), self.byte, rank, 0, self.world)

    def receive(self, values: array[Any], rank: int) -> None:
        """Receive an array."""
        self.call("Recv", place(values), length(values), self.byte, rank, 0, self.world, None)

    def waits(self, rank: int) -> bool:
        """Whether a message from a rank is waiting to be received."""
        flag = ctypes.c_int()
        self.call("Iprobe", rank, 0, self.world, ctypes.byref(flag), None)
        return bool(flag.value)

    def reduce(self, values: array[Any], kind: str, how: str) -> array[Any]:
        """Combine the arrays of all ranks element by element."""
        total = array(values.typecode, bytes(length(values)))
        handles = self.handle(kind), self.handle(f"op_{how}")
        self.call("Allreduce", place(values), place(total), len(values), *handles, self.world)
        return total

    def gather(self, thing: Any) -> list[Any]:
        """Collect an object from every rank, in the order of ranks."""
        text = json.dumps(thing).encode()
        width = self.reduce(array("q", [len(text)]), "int64_t", "max")[0]
        own, every = array("b", text.ljust(width)), array("b", bytes(width * self.size))
        self.call("Allgather", place(own), width, self.byte, place(every), width, self.byte, self.world)
        whole = every.tobytes()
        return [json.loads(whole[start : start + width]) for start in range(0, len(whole), width)]


def place(values: array[Any]) -> ctypes.c_void_p:
    """The address of an array's memory."""
    return ctypes.c_void_p(values.buffer_info()[0])


def length(values: array[Any]) -> int:
    """The size of an array in bytes."""
    return len(values) * values.itemsize
