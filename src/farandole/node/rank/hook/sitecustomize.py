"""Tell what started this rank which frameworks a program uses, and with how many ranks it met through them.

Python imports this before any program of a run, and then the sitecustomize that it hides. Nothing here may fail.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
# Every start of Python waits for what is imported here.
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

# The socket of what started this rank; and the number of this rank, if its launcher is torchrun or accelerate.
ADDRESS, RANK = os.environ.get("FARANDOLE_MEETING", ""), os.environ.get("RANK", "-")
FRAMEWORKS = {"torch", "tensorflow", "jax", "keras", "mpi4py", "horovod"}
# By which a program that uses no framework for it divides the work.
RANKS = {"RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}
# Of what asks for it, only the program counts; the frameworks look for it themselves.
THROUGH = ("/os.py", "<frozen os>", "_collections_abc.py", "<frozen _collections_abc>")
ASKING = ("get", "getenv", "__contains__")
LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen")  # noqa: PTH120
# How addresses begin by which a node means itself; and what is told then.
LOCAL, HERE = ("tcp://localhost", "tcp://127.", "tcp://[::1]", "tcp://::1"), "@node"
# In whose import ranks meet.
MPI = "mpi4py.MPI"
told: set[str] = set()


def tell(what: str) -> None:
    """Send a message, once; whoever waits for it may be gone."""
    if what in told:
        return
    told.add(what)
    with suppress(Exception):
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(1)
            sender.sendto(what.encode(), ADDRESS)


def met(framework: str, count: Callable[[], int]) -> None:
    with suppress(Exception):
        tell(f"met {framework} {int(count())}")


def meets(what: str, framework: str) -> None:
    """Tell that this rank begins to wait for the others, or has stopped."""
    if framework:
        tell(f"{what} {framework} {RANK} {os.getpid()}")


def after(owner: Any, name: str, then: Callable[..., None], meeting: str = "") -> None:
    """Do something when a function has returned, with the arguments that it got; ranks may wait for others in it."""
    function = getattr(owner, name, None)
    if not callable(function):
        return

    def replaced(*arguments: Any, **options: Any) -> Any:
        meets("enters", meeting)
        try:
            returned = function(*arguments, **options)
        finally:
            meets("leaves", meeting)
        with suppress(Exception):
            then(*arguments, *options.values())
        return returned

    with suppress(Exception):
        import functools

        setattr(owner, name, functools.wraps(function)(replaced))


def joined(given: tuple[Any, ...], count: Callable[[], int]) -> None:
    """Tell of a group of torch.distributed, which does not reach beyond this node if its first rank is at localhost."""
    name = "torch.distributed"
    words = [getattr(thing, "init_method", thing) for thing in given]
    where = next((word for word in words if isinstance(word, str) and "://" in word), "env://")
    if where.startswith("env://"):
        has_store = any("Store" in type(thing).__name__ for thing in given)
        where = "" if has_store else f"tcp://{os.environ.get('MASTER_ADDR', '')}"
        if where and not where.startswith(LOCAL):
            # Where groups are apart, such as one of each node, their ports are others.
            tell(f"at {os.environ.get('MASTER_PORT', '')}")
    met(f"{name}{HERE if where.startswith(LOCAL) else ''}", count)


def of_torch(module: ModuleType) -> None:
    after(module, "init_process_group", lambda *given: joined(given, module.get_world_size), "torch.distributed")


def of_torch_rpc(module: ModuleType) -> None:
    def count() -> int:
        return len(module.api._get_current_rpc_agent().get_worker_infos())

    after(module, "init_rpc", lambda *given: joined(given, count))


def of_accelerate(module: ModuleType) -> None:
    # Not PartialState, which helpers make, too.
    after(module.AcceleratorState, "__init__", lambda state, *_: met("Accelerate", lambda: state.num_processes))


def of_horovod(module: ModuleType) -> None:
    after(module.HorovodBasics, "init", lambda basics, *_: met("Horovod", basics.size), "Horovod")


def of_optimizer(module: ModuleType) -> None:
    def of_keras_3(_: Any, optimizer: Any, *__: Any) -> None:
        version = str(getattr(sys.modules.get("keras"), "__version__", ""))
        if type(optimizer).__module__.startswith("keras.") and version.startswith("3."):
            tell("wraps")

    after(module, "create_distributed_optimizer", of_keras_3)


def of_reduction(module: ModuleType) -> None:
    for name in ("_allreduce", "_grouped_allreduce"):
        after(module, name, lambda *_: tell("reduces"))


def of_mpi(module: ModuleType) -> None:
    def ask() -> None:
        if module.Is_initialized() and not module.Is_finalized():
            met("MPI", module.COMM_WORLD.Get_size)

    ask()
    # A program may initialize it later.
    atexit.register(ask)


def of_jax(module: ModuleType) -> None:
    after(module.State, "initialize", lambda state, *_: met("JAX", lambda: state.num_processes), "JAX")


def of_tensorflow_strategy(module: ModuleType) -> None:
    after(module.CollectiveAllReduceExtended, "_initialize_multi_worker", lambda *_: None, "TensorFlow")


def of_tensorflow(module: ModuleType) -> None:
    def tasks(_: Any, server: Any) -> None:
        met("TensorFlow", lambda: sum(len(job.tasks) for job in server.cluster.job))

    after(module.Context, "enable_collective_ops", tasks)


# Modules with the functions through which ranks meet.
WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "torch.distributed.distributed_c10d": of_torch,
    "torch.distributed.rpc": of_torch_rpc,
    "accelerate.state": of_accelerate,
    "horovod.common.basics": of_horovod,
    "horovod._keras": of_optimizer,
    "horovod.tensorflow.mpi_ops": of_reduction,
    MPI: of_mpi,
    "jax._src.distributed": of_jax,
    "tensorflow.python.distribute.collective_all_reduce_strategy": of_tensorflow_strategy,
    "tensorflow.python.eager.context": of_tensorflow,
}


class Watch:
    """Finds nothing by itself: it learns of what others find."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in FRAMEWORKS and name not in WATCHED:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in found if spec), None)
        with suppress(Exception):
            if spec and spec.loader:
                # Its functions are replaced before anybody else can import them.
                loader: Any = spec.loader
                execute = loader.exec_module

                def executed(module: ModuleType) -> None:
                    meeting = "MPI" if name == MPI else ""
                    meets("enters", meeting)
                    try:
                        execute(module)
                    finally:
                        meets("leaves", meeting)
                    if name in FRAMEWORKS:
                        tell(f"uses {name}")
                    else:
                        with suppress(Exception):
                            WATCHED[name](module)

                loader.exec_module = executed
        return spec


def watch_environment() -> None:
    """Learn whether the program itself asks for its rank."""
    kind: Any = type(os.environ)
    get = kind.__getitem__

    last = (0, 0)

    def got(environment: Any, name: Any) -> Any:
        nonlocal last
        with suppress(Exception):
            frame: Any = sys._getframe(1)
            # One place that asks for one variable after the other copies all of them.
            here, before = (id(frame), frame.f_lasti), last
            last = here
            if name in RANKS and "reads" not in told and here != before:
                while frame and frame.f_code.co_filename.endswith(THROUGH):
                    frame = frame.f_back if frame.f_code.co_name in ASKING else None
                if frame and not any(place in frame.f_code.co_filename for place in LIBRARIES):
                    tell("reads")
        return get(environment, name)

    kind.__getitem__ = got


def chain() -> None:
    """Import the sitecustomize that this one hides."""
    here = os.path.dirname(__file__)  # noqa: PTH120
    sys.path[:] = [folder for folder in sys.path if folder != here]
    own = sys.modules.pop("sitecustomize")
    with suppress(ModuleNotFoundError):
        __import__("sitecustomize")
    # It has to be there, for what imports it.
    sys.modules.setdefault("sitecustomize", own)


def begin() -> None:
    """Watch what is imported and asked for from now on."""
    if ADDRESS:
        sys.meta_path.insert(0, Watch())
        with suppress(Exception):
            watch_environment()
    chain()


begin()
