"""The process that judges answers which need algebra: `python -m evals.grading.math_worker`, run by `math_pool`.

It reads one JSON request per line from standard input and writes one JSON reply per line. Before each request it
arms a kernel timer whose default action is to end the process, which works even while the interpreter lock is held
and even when nobody is left to kill it. Memory is limited by `RLIMIT_AS`.
"""

import json
import os
import resource
import select
import signal

MEMORY_LIMIT_BYTES = 2 << 30
PARENT_CHECK_S = 2.0


def serve(requests: int, replies: int) -> None:
    """Answers requests from one file descriptor on another until it closes or the parent is gone."""
    from evals.grading.math_algebra import judge_with_algebra

    parent = os.getppid()
    os.write(replies, b'{"ready": true}\n')
    buffer = b""
    while True:
        while b"\n" not in buffer:
            if not select.select([requests], [], [], PARENT_CHECK_S)[0]:
                if os.getppid() != parent:
                    return
                continue
            chunk = os.read(requests, 1 << 16)
            if not chunk:
                return
            buffer += chunk
        line, buffer = buffer.split(b"\n", 1)
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.pop("timeout_s"))
        try:
            reply: dict = {"reason": judge_with_algebra(**request)}
        except MemoryError:
            reply = {"reason": "timeout", "leaving": True}
        except RecursionError:
            reply = {"reason": "unparsed"}
        except Exception as error:  # whatever an algebra library raises is one verdict, not the pool's end
            reply = {"reason": "grader_error", "detail": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(replies, json.dumps(reply).encode() + b"\n")
        if "leaving" in reply:
            return


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    serve(requests=0, replies=replies)


if __name__ == "__main__":
    main()
