"""Every failure has a class and a policy; errors are real ones wherever this machine can raise them."""

import errno
import os
import socket
import urllib.request
from pathlib import Path

import pytest

from orchestrator.failures import MAX_WAIT_S, POLICIES, Failure, Kind, classify, wait_before_retry
from orchestrator.leases import Busy


def raised(action) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


def test_every_class_has_a_policy():
    assert set(POLICIES) == set(Kind)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no room"), Kind.HOST_MEMORY),
        (FloatingPointError("the gradient norm is nan at step 3"), Kind.NOT_FINITE),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Kind.DISK_FULL),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), Kind.DISK_FULL),
        (OSError(errno.EIO, os.strerror(errno.EIO)), Kind.STORAGE),
        (FileNotFoundError("there is no such model"), Kind.NOT_THERE),
        (PermissionError("not yours"), Kind.NOT_THERE),
        (ConnectionResetError("reset by peer"), Kind.UNREACHABLE),
        (TimeoutError("timed out"), Kind.UNREACHABLE),
        (Busy("held"), Kind.IN_USE),
        (RuntimeError("NCCL error: unhandled system error"), Kind.DEVICE),
        (RuntimeError("[Gloo] Connection closed by peer"), Kind.DEVICE),
        (ValueError("rule must be known\nand more"), Kind.ERROR),
        (KeyError("x"), Kind.ERROR),
    ],
)
def test_errors_are_classified_by_what_they_are(error, kind):
    failure = classify(error)
    assert failure.kind == kind
    assert failure.reason.startswith(type(error).__name__)
    assert "\n" not in failure.reason


def test_torch_and_ray_say_that_memory_ran_out_in_their_own_ways():
    import ray
    import torch

    assert classify(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")).kind == Kind.GPU_MEMORY
    assert classify(ray.exceptions.OutOfMemoryError("evicted")).kind == Kind.HOST_MEMORY
    real = raised(lambda: torch.empty(2**55))
    assert classify(real).kind == Kind.HOST_MEMORY, real


def test_what_ray_says_of_lost_tasks_is_put_in_words():
    from ray import exceptions

    expected = {
        exceptions.WorkerCrashedError(): (Kind.WORKER_KILLED, "its worker process died"),
        exceptions.NodeDiedError("a long text"): (Kind.NODE_LOST, "its node was lost"),
        exceptions.TaskUnschedulableError("a long text"): (Kind.NODE_LOST, "its node was lost"),
    }
    for error, (kind, reason) in expected.items():
        assert (classify(error).kind, classify(error).reason) == (kind, reason)


def test_the_cause_of_an_error_and_the_errors_of_a_gang_count():
    from ray.exceptions import RayTaskError
    from ray.train import WorkerGroupError

    def lost() -> None:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=5)
        except OSError as error:
            raise FileNotFoundError("cannot load the model") from error

    assert classify(raised(lost)).kind == Kind.UNREACHABLE
    carried = RayTaskError("train", "a long traceback", ValueError("no such problem")).as_instanceof_cause()
    assert classify(carried) == Failure(Kind.ERROR, "ValueError: no such problem")
    gang = WorkerGroupError("two workers failed", {0: RuntimeError("Gloo: closed"), 1: MemoryError("no room")})
    assert classify(gang).kind == Kind.HOST_MEMORY
    assert classify(gang).reason == "MemoryError: no room"


def test_a_server_that_does_not_answer_is_asked_again_and_a_hub_that_is_switched_off_is_not(monkeypatch):
    import huggingface_hub.constants as constants

    from evals.engines.models import load_model

    assert classify(raised(lambda: urllib.request.urlopen("http://127.0.0.1:9", timeout=5))).kind == Kind.UNREACHABLE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    switched_off = raised(lambda: load_model({"hub_id": "nobody/no-such-model-here"}))
    assert classify(switched_off).kind == Kind.NOT_THERE
    assert POLICIES[Kind.UNREACHABLE].retry and not POLICIES[Kind.NOT_THERE].retry


def test_the_pause_doubles_up_to_a_limit():
    assert [wait_before_retry(10, number) for number in (1, 2, 3, 20)] == [10, 20, 40, MAX_WAIT_S]


def test_the_documentation_has_every_class():
    text = Path("docs/scheduling.md").read_text()
    for kind in Kind:
        assert f"| {kind.value} |" in text, kind
