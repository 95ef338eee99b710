"""What went wrong, and what is done about it? Every failure has a class, and every class has one policy."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

MAX_WAIT_S = 600.0
"""Longest pause before a retry."""


class Kind(StrEnum):
    """Classes of failures. Where one error shows several, the first of them in this order counts."""

    GPU_MEMORY = "out of GPU memory"
    HOST_MEMORY = "out of host memory"
    NOT_FINITE = "not finite"
    DISK_FULL = "disk full"
    DAMAGED = "checkpoint damaged"
    HUNG = "hung"
    PREEMPTED = "preempted"
    NODE_LOST = "node lost"
    WORKER_KILLED = "worker killed"
    IN_USE = "in use"
    NOT_THERE = "not there"
    UNREACHABLE = "unreachable"
    DEVICE = "device"
    STORAGE = "storage"
    NO_RESULT = "no result"
    ERROR = "error"
    TRACKING = "tracking"


@dataclass(frozen=True)
class Policy:
    """What is done about a class of failures.

    Attributes:
        signs: what the class is recognised by, for the reader.
        retry: start again, from the last checkpoint; else the cell fails at once.
        halve: a retry of the training cuts the micro-batch budget in half.
        remedy: what the person can do; it goes into the reason of a cell that failed.
    """

    signs: str
    retry: bool
    halve: bool = False
    remedy: str = ""


POLICIES: dict[Kind, Policy] = {
    Kind.GPU_MEMORY: Policy(
        "PyTorch's OutOfMemoryError", True, halve=True,
        remedy="give the model more GPUs, or lower train.max_response_tokens",
    ),
    Kind.HOST_MEMORY: Policy(
        "MemoryError, Ray's OutOfMemoryError, or the kernel's", True, halve=True,
        remedy="run fewer tasks per node (raise the model's cpus), or use nodes with more memory",
    ),
    Kind.NOT_FINITE: Policy(
        "FloatingPointError: a loss or gradient is NaN or infinite, and would be again", False,
        remedy="lower train.learning_rate, or use float32",
    ),
    Kind.DISK_FULL: Policy("no space or no quota left", True, remedy="free space, or use --runs-dir"),
    Kind.DAMAGED: Policy("weights that cannot be read; the training goes back to the checkpoint before", True),
    Kind.HUNG: Policy("no step, sample or log line for too long; the process is killed", True),
    Kind.PREEMPTED: Policy("the node was reclaimed", True),
    Kind.NODE_LOST: Policy("the node died, or cannot be reached", True),
    Kind.WORKER_KILLED: Policy("the process died by a signal", True),
    Kind.IN_USE: Policy("a process whose command was killed is about to notice", True),
    Kind.NOT_THERE: Policy("a model, data set or file does not exist, or may not be read", False),
    Kind.UNREACHABLE: Policy(
        "the hub or another server does not answer", True,
        remedy="check the network; local files (--data-dir, a model's path) need none",
    ),
    Kind.DEVICE: Policy("an error of CUDA, NCCL or Gloo", True),
    Kind.STORAGE: Policy("any other error of the operating system", True),
    Kind.NO_RESULT: Policy("the task ended, and its result file is not there", False),
    Kind.ERROR: Policy("any other exception", False),
    Kind.TRACKING: Policy(
        "MLflow does not take the results; cells go on, and it gets all that it lacks once it answers", True,
        remedy="start the server again and run the same command",
    ),
}  # fmt: skip
"""The one table of policies."""


@dataclass(frozen=True)
class Failure:
    """Why a task ended without its result, in words."""

    kind: Kind
    reason: str

    @property
    def policy(self) -> Policy:
        return POLICIES[self.kind]


def wait_before_retry(first_s: float, number: int) -> float:
    """Seconds before a cell's retry, 1 being the first: doubled each time, up to `MAX_WAIT_S`."""
    return min(first_s * 2 ** (number - 1), MAX_WAIT_S)


def classify(error: BaseException) -> Failure:
    """The class of an exception that a task raised, or that Ray raised for it, with a reason in words."""
    related = list(_related(error))
    for kind, matches in _SIGNS:
        for member in related:
            if matches(member):
                return Failure(kind, _IN_WORDS.get(type(member).__name__) or _words(member))
    return Failure(Kind.ERROR, _words(related[0]))


def _words(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


_IN_WORDS = {
    "WorkerCrashedError": "its worker process died",
    "ActorDiedError": "one of its worker processes died",
    "ActorUnavailableError": "one of its worker processes does not answer",
    "NodeDiedError": "its node was lost",
    "LocalRayletDiedError": "its node was lost",
    "TaskUnschedulableError": "its node was lost",
    "ActorUnschedulableError": "its node was lost",
    "PreemptionError": "its node was reclaimed",
}
"""Ray's errors, whose own messages are long."""


def _named(*names: str) -> Callable[[BaseException], bool]:
    """Whether an error's class or one of its bases has one of these names; saves importing their packages."""
    return lambda error: any(base.__name__ in names for base in type(error).__mro__)


def _says(*texts: str) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def _gpu_memory(error: BaseException) -> bool:
    return _named("OutOfMemoryError")(error) and type(error).__module__.startswith("torch")


def _host_memory(error: BaseException) -> bool:
    rays = _named("OutOfMemoryError")(error) and type(error).__module__.startswith("ray")
    return rays or isinstance(error, MemoryError) or _says("DefaultCPUAllocator: can't allocate")(error)


def _no_space(error: BaseException) -> bool:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or _named("OutOfDiskError")(error)


def _server_trouble(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and (status >= 500 or status == 429)


_SIGNS: list[tuple[Kind, Callable[[BaseException], bool]]] = [
    (Kind.GPU_MEMORY, _gpu_memory),
    (Kind.HOST_MEMORY, _host_memory),
    (Kind.NOT_FINITE, lambda error: isinstance(error, FloatingPointError)),
    (Kind.DISK_FULL, _no_space),
    (Kind.PREEMPTED, lambda error: _named("PreemptionError")(error) or getattr(error, "preempted", False) is True),
    (
        Kind.NODE_LOST,
        _named("NodeDiedError", "LocalRayletDiedError", "TaskUnschedulableError", "ActorUnschedulableError"),
    ),
    (Kind.WORKER_KILLED, _named("WorkerCrashedError", "ActorDiedError", "ActorUnavailableError")),
    (Kind.IN_USE, _named("Busy")),
    (
        Kind.NOT_THERE,
        _named(
            "OfflineModeIsEnabled", "RepositoryNotFoundError", "RevisionNotFoundError", "RemoteEntryNotFoundError",
            "DatasetNotFoundError",
        ),
    ),
    (Kind.UNREACHABLE, _server_trouble),
    (
        Kind.UNREACHABLE,
        _named("ConnectionError", "ConnectError", "TimeoutError", "Timeout", "TimeoutException", "URLError"),
    ),
    (Kind.NOT_THERE, lambda error: isinstance(error, FileNotFoundError | PermissionError)),
    (Kind.DEVICE, _named("AcceleratorError")),
    (Kind.DEVICE, _says("CUDA error", "NCCL", "Gloo", "gloo")),
    (Kind.STORAGE, lambda error: isinstance(error, OSError)),
]  # fmt: skip
"""How a class is recognised, in the order of `Kind`."""


def _is_wrapper(error: BaseException) -> bool:
    """Whether it only carries what a task has raised, under a long message of Ray's own."""
    return type(error).__name__.startswith("RayTaskError") and isinstance(getattr(error, "cause", None), BaseException)


def _related(error: BaseException | None, seen: set[int] | None = None) -> Iterator[BaseException]:
    """An error, what it came from, and the errors of the workers that it gathers."""
    seen = set() if seen is None else seen
    if not isinstance(error, BaseException) or id(error) in seen:
        return
    seen.add(id(error))
    if not _is_wrapper(error):
        yield error
    gathered = getattr(error, "worker_failures", None)
    inner = [
        *(gathered.values() if isinstance(gathered, dict) else ()),
        *(getattr(error, name, None) for name in ("controller_failure", "_base_exc", "cause")),
        error.__cause__,
        error.__context__,
    ]
    for member in inner:
        yield from _related(member, seen)
