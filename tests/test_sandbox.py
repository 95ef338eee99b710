"""The sandbox: what a program may use, what it cannot reach, and that the next program never notices.

Each attack runs in both rungs. It prints `won` if it got what it was after, and the test that it is graded on expects
just that, so a rung that lets it through makes the attack pass.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from evals.grading import sandbox
from evals.grading.code import grade_program
from evals.grading.sandbox import Limits, SandboxUnavailable, start_program

RUNGS = ("bubblewrap", "landlock")
SECRET = "correct-horse-battery"


@pytest.fixture(params=RUNGS)
def rung(request):
    fault = sandbox._fault(request.param)
    if fault is not None:
        pytest.skip(f"{request.param}: {fault}")
    return request.param


def run(program, rung, *, stdin=b"", limits=None):
    with start_program(program, stdin=stdin, rung=rung, limits=limits or Limits(cpu_s=2, wall_s=8)) as running:
        ending = running.wait()
    return ending, bytes(running.stdout)


# --- attacks -------------------------------------------------------------------------------------------------------

RAW = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
won = lambda ok: ok and print("won")
def attempt(action):
    try:
        return action()
    except Exception:
        return None
X86 = os.uname().machine == "x86_64"
"""

ATTACKS = {
    "fork bomb": """
import os
won = False
while True:
    try:
        os.fork(); won = True
    except OSError:
        break
if won: print("won")
""",
    "subprocess": "import subprocess; subprocess.run(['/bin/true']); print('won')",
    "posix_spawn": "import os; os.posix_spawn('/bin/true', ['true'], {}); print('won')",
    "vfork and clone by number": RAW
    + "won(X86 and (libc.syscall(58) >= 0 or libc.syscall(56, 17, 0, 0, 0, 0) >= 0 or libc.syscall(435, 0, 0) >= 0))",
    "another program in its place": "import os; os.execv('/bin/echo', ['echo', 'won'])",
    "thread bomb": """
import threading, time
threading.stack_size(32768)
for _ in range(10 ** 6):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("won")
""",
    "memory bomb": """
hoard = []
while True:
    hoard.append(bytearray(64 << 20))
    if len(hoard) > 64: print("won"); break
""",
    "output flood": "while True: print('won' * 10000)",
    "file flood": """
with open("/tmp/flood", "wb") as file:
    for _ in range(200): file.write(bytes(1 << 20))
print("won")
""",
    "many files": """
for i in range(200):
    with open(f"/tmp/{i}", "wb") as file: file.write(bytes(1 << 20))
print("won")
""",
    "TCP": "import socket; socket.create_connection(('127.0.0.1', PORT), 2); print('won')",
    "any socket": """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind); print("won"); raise SystemExit
        except OSError: pass
""",
    "datagram pair": "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('won')",
    "read /etc/passwd": "print('won' if 'root' in open('/etc/passwd').read() else '')",
    "read the home directory": "import os; print('won' if os.listdir(HOME) else '')",
    "read a file of the host": "print('won' if open(FILE).read() else '')",
    "climb to a file of the host": "print('won' if open('/usr/lib/../..' + FILE).read() else '')",
    "parent's environment": """
import os
for pid in [os.getppid(), HOST_PID, *range(1, 300), "self"]:
    try:
        if SECRET.encode() in open(f"/proc/{pid}/environ", "rb").read(): print("won"); break
    except OSError: pass
""",
    "own environment": "import os; print('won' if SECRET in str(os.environ) else '')",
    "parent's memory": RAW
    + """
for pid in (os.getppid(), HOST_PID):
    won(attempt(lambda: open(f"/proc/{pid}/mem", "rb")))
    buffer = ctypes.create_string_buffer(8)
    iov = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    theirs = (ctypes.c_void_p * 2)(id(None), 8)
    won(X86 and libc.syscall(310, pid, iov, 1, theirs, 1, 0) > 0)
    won(libc.ptrace(16, pid, 0, 0) == 0)
""",
    "write outside": """
import os
for place in ("/", HOME, "/var/tmp", "/dev/shm", "/usr/lib", os.path.dirname(FILE), os.path.dirname(os.__file__)):
    try:
        open(os.path.join(place, "sandbox-was-here"), "w"); print("won"); break
    except OSError: pass
""",
    "change a file's mode or time": """
import os
for action in (lambda: os.chmod(FILE, 0o777), lambda: os.utime(FILE, (0, 0)), lambda: os.truncate(FILE, 0),
               lambda: os.unlink(FILE), lambda: os.rename(FILE, FILE + "x"), lambda: os.chmod(os.__file__, 0o600),
               lambda: os.utime(os.__file__, (0, 0)), lambda: os.mkdir(FILE + "d"), lambda: os.mkfifo("/tmp/f")):
    try:
        action(); print("won"); break
    except OSError: pass
""",
    "kill the parent": RAW
    + """
for pid in (os.getppid(), HOST_PID, -1, 0, 1):
    for number in (0, 9, 19):
        won(attempt(lambda: os.kill(pid, number) is None))
won(attempt(lambda: os.killpg(os.getpgid(os.getppid()), 9) is None))
won(attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9) is None))
""",
    "signals by other doors": RAW
    + """
import fcntl
r, w = os.pipe()
won(attempt(lambda: fcntl.fcntl(r, 8, os.getppid())) == 0)
won(attempt(lambda: fcntl.fcntl(r, 10, 9)) == 0)
info = ctypes.create_string_buffer(128)
won(X86 and libc.syscall(129, os.getppid(), 9, info) == 0)
won(X86 and libc.syscall(234, os.getppid(), os.getppid(), 9) == 0)
""",
    "limits of others": """
import os, resource
for pid in (os.getppid(), HOST_PID):
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)); print("won")
    except OSError: pass
for action in (lambda: os.setpriority(os.PRIO_USER, 0, 19), lambda: os.sched_setaffinity(os.getppid(), {0})):
    try:
        action(); print("won")
    except OSError: pass
""",
    "higher limits for itself": """
import resource
for which in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
    hard = resource.getrlimit(which)[1]
    try:
        resource.setrlimit(which, (hard + 1, hard + 1)); print("won"); break
    except (OSError, ValueError): pass
""",
    "another session": """
import os, time
try:
    os.setsid(); print("won")
except OSError: pass
if os.fork() == 0:
    os.setsid()
    time.sleep(1)
    open(FILE + ".survivor", "w").write("x")
print("won")
""",
    "namespaces and mounts": RAW
    + """
won(libc.unshare(0x10000000) == 0)
won(libc.mount(b"none", b"/tmp", b"tmpfs", 0, 0) == 0)
won(libc.chroot(b"/tmp") == 0)
won(X86 and libc.syscall(425, 1, ctypes.create_string_buffer(256)) >= 0)
""",
    "capabilities": RAW
    + """
data = (ctypes.c_uint32 * 6)()
libc.syscall(125 if X86 else 90, (ctypes.c_uint32 * 2)(0x20080522, 0), data)
won(any(data))
won(attempt(lambda: os.setuid(0) is None))
""",
    "symbolic link": """
import os
for name in ("/tmp/link", "link"):
    try:
        os.symlink("/etc/passwd", name)
        print("won" if open(name).read() else "")
    except OSError: pass
""",
    "hard link": "import os; os.link(os.__file__, '/tmp/link'); print('won')",
    "links of /proc": """
for path in ("/proc/self/root/etc/passwd", "/proc/1/root/etc/passwd", "/proc/self/cwd/../etc/passwd", "/dev/fd/0/../x"):
    try:
        open(path).read(); print("won")
    except OSError: pass
""",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'w').write('x'); print('won')",
    "huge recursion": """
import sys
sys.setrecursionlimit(10 ** 9)
def down(n): return down(n + 1) + 1
down(0); print("won")
""",
    "recursion in C": """
import sys
sys.setrecursionlimit(10 ** 9)
class Deep:
    def __repr__(self): return repr([self])
    def __len__(self): return len(self)
len(Deep()); print("won")
""",
    "deaf to its CPU limit": """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
for number in range(1, 65):
    try: signal.signal(number, lambda *_: None)
    except (OSError, ValueError): pass
while True: pass
""",
    "sleep": "import time; time.sleep(100); print('won')",
    "wait for oneself": "import threading; l = threading.Lock(); l.acquire(); l.acquire(); print('won')",
    "threads that stay": """
import threading
def spin():
    while True: pass
for _ in range(4): threading.Thread(target=spin).start()
print("won")
""",
    "stop itself": "import os; os.kill(os.getpid(), 19); print('won')",
    "leave at once": "import os; print('won'); os._exit(0)",  # printed, but never flushed
    "crash": "import ctypes; ctypes.string_at(0); print('won')",
}  # fmt: skip


def fill_in(program, host_file, port):
    facts = {"FILE": str(host_file), "HOME": str(Path.home()), "HOST_PID": os.getpid(), "SECRET": SECRET, "PORT": port}
    return "\n".join(f"{name} = {value!r}" for name, value in facts.items()) + "\n" + program


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails_and_leaves_no_trace(name, rung, tmp_path, monkeypatch):
    monkeypatch.setenv("SANDBOX_TEST_SECRET", SECRET)
    host_file = tmp_path / "precious"
    host_file.write_text("precious")
    before = host_file.stat()
    with listening_port() as port:
        verdict = grade_program(
            fill_in(ATTACKS[name], host_file, port),
            [{"input": "", "output": "won"}],
            time_limit_s=1,
            limits=Limits(wall_s=2.5, memory_bytes=512 << 20, output_bytes=1 << 20),
            rung=rung,
        )
    assert not verdict.correct, verdict
    assert verdict.reason in ("runtime_error", "wrong_answer", "timeout", "output_limit")
    assert host_file.read_text() == "precious"
    after = host_file.stat()
    assert (after.st_mode, after.st_mtime) == (before.st_mode, before.st_mtime)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious"]
    for place in ("/", str(Path.home()), "/var/tmp", "/tmp", "/dev/shm", os.path.dirname(os.__file__)):
        assert not {"sandbox-was-here", "flood", "link"} & set(os.listdir(place)), place
    assert grade_program("print(input())", [{"input": "next", "output": "next"}], rung=rung).correct
    assert not programs_alive()


HARMLESS = ("subprocess", "posix_spawn", "another program in its place", "TCP", "any socket", "datagram pair",
            "read /etc/passwd", "read a file of the host", "climb to a file of the host", "links of /proc")  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_the_attacks_work_where_nothing_holds_them_back(name, tmp_path):
    host_file = tmp_path / "precious"
    host_file.write_text("precious")
    with listening_port() as port:
        program = fill_in(ATTACKS[name], host_file, port)
        assert run(program, "none", limits=Limits(cpu_s=5))[1].split()[:1] == [b"won"]


@contextmanager
def listening_port():
    """A port on which the host would answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def programs_alive():
    """Processes under the idle zygotes beside the one that waits for a request: programs that outlived their run."""
    zygotes = [zygote for waiting in sandbox._idle.values() for zygote in waiting]
    return [child for zygote in zygotes for child in sandbox._children(zygote._pid)[1:]]


# --- what a program gets ---------------------------------------------------------------------------------------------


def test_standard_input_is_a_pipe_that_every_way_of_reading_shares(rung):
    program = (
        "import os, sys\n"
        "print(input(), sys.stdin.readline().strip(), sys.stdin.buffer.readline(), sys.stdin.fileno())\n"
        "print(os.fstat(0).st_mode & 0o170000 == 0o010000, sys.stdin.read() == '', input.__module__)\n"
    )
    _, output = run(program, rung, stdin=b"a\nb\n")
    assert output == b"a b b'' 0\nTrue True builtins\n"
    _, output = run("import sys\nrd = sys.stdin.buffer.readline\nprint(int(rd()) + sum(map(int, rd().split())))",
                    rung, stdin=b"3\n10 20\n")  # fmt: skip
    assert output == b"33\n"
    assert run("print(open(0).read().upper())", rung, stdin=b"whole")[1] == b"WHOLE\n"


def test_megabytes_both_ways_do_not_deadlock(rung):
    data = os.urandom(1 << 20).hex().encode() + b"\n"
    program = "import sys\nfor line in sys.stdin: sys.stdout.write(line); sys.stdout.flush()"
    assert run(program, rung, stdin=data)[1] == data
    ending, output = run("import sys; sys.stdout.write('x' * 3000000); sys.stderr.write('y' * 3000000)", rung)
    assert (ending.reason, ending.exit_code, len(output)) == ("exited", 0, 3_000_000)


def test_unread_input_is_no_fault(rung):
    ending, output = run("print('done')", rung, stdin=b"z" * 5_000_000)
    assert (ending.reason, ending.exit_code, output) == ("exited", 0, b"done\n")


def test_output_is_whole_up_to_the_limit_and_an_ending_of_its_own_beyond(rung):
    assert run("print('x' * 400_000)", rung)[1] == b"x" * 400_000 + b"\n"
    limits = Limits(cpu_s=2, output_bytes=1000)
    assert run("print('x' * 999)", rung, limits=limits)[0].reason == "exited"
    assert run("print('x' * 1000)", rung, limits=limits)[0].reason == "output_limit"
    assert run("while True: print('x' * 1000)", rung, limits=limits)[0].reason == "output_limit"


def test_exit_codes(rung):
    cases = {"": 0, "exit()": 0, "quit(3)": 3, "import sys; sys.exit('no')": 1, "1 / 0": 1, "import os; os._exit(7)": 7,
             "def broken(:": 1, "import os; os.abort()": -11}  # fmt: skip
    for program, exit_code in cases.items():
        assert run(program, rung)[0].exit_code in ({exit_code, -6} if exit_code < 0 else {exit_code}), program


def test_a_script_ends_as_python_ends_one(rung):
    program = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('main', __name__)\n"
    )
    assert run(program, rung)[1] == b"main __main__\nthread\nat exit\n"
    held = "import io, sys, atexit\nreal, sys.stdout = sys.stdout, io.StringIO()\nprint('held back')\n"
    assert run(held + "atexit.register(lambda: real.write(sys.stdout.getvalue()))", rung)[1] == b"held back\n"


def test_the_usual_tools_work(rung):
    program = """
import asyncio, threading, sys, random, functools, signal
from dataclasses import dataclass
@dataclass
class Point:
    x: int = 1
@functools.lru_cache(None)
def depth(n): return 0 if n == 0 else depth(n - 1) + 1
sys.setrecursionlimit(10 ** 6)
results = [depth(20000), Point().x, asyncio.run(asyncio.sleep(0, "slept"))]
threading.stack_size(256 << 20)
thread = threading.Thread(target=lambda: results.append("threaded"))
thread.start(); thread.join()
signal.alarm(5)
print(results, len(str(7 ** 6000)))
"""
    ending, output = run(program, rung)
    assert (ending.exit_code, output) == (0, b"[20000, 1, 'slept', 'threaded'] 5071\n")


def test_packages_only_where_they_are_allowed(rung):
    for packages, expected in ((True, b"numpy\n"), (False, b"")):
        with start_program("import numpy; print(numpy.__name__)", rung=rung, packages=packages) as running:
            running.wait()
            assert running.stdout == expected


def test_cpu_and_wall_limits(rung):
    limits = Limits(cpu_s=1, wall_s=1.5)
    started = time.monotonic()
    assert run("while True: pass", rung, limits=Limits(cpu_s=1))[0].reason == "timeout"
    assert run("import time; time.sleep(1000)", rung, limits=limits)[0].reason == "timeout"
    assert time.monotonic() - started < 60
    assert Limits(cpu_s=1).clock_s == 4 and Limits(cpu_s=0.2).whole_cpu_s == 1


def test_memory_limit_is_the_programs_own_error(rung):
    program = "try:\n    x = bytearray(3 << 30)\nexcept MemoryError:\n    print('refused')"
    assert run(program, rung)[1] == b"refused\n"


def test_too_many_threads_are_an_ending(rung):
    program = "import threading, time\nfor _ in range(200): threading.Thread(target=time.sleep, args=(9,)).start()"
    assert run(program, rung)[0].reason == "process_limit"
    few = "import threading\nfor _ in range(20): threading.Thread(target=print, args=('t',)).start()"
    assert run(few, rung)[0].reason == "exited"


def test_private_files_on_bubblewrap_none_on_landlock(rung):
    write = "import os\nopen('/tmp/kept', 'w').write('mine')\nprint(open('/tmp/kept').read(), os.listdir('/tmp'))"
    ending, output = run(write, rung)
    if rung == "bubblewrap":
        assert output == b"mine ['kept']\n"
        assert run("import os; print(os.listdir('/tmp'), os.listdir('.'))", rung)[1] == b"[] []\n"
        assert run("open('/tmp/a', 'wb').write(bytes(20 << 20))", rung)[0].exit_code == 1
    else:
        assert (ending.exit_code, output) == (1, b"")


def test_programs_do_not_inherit_from_each_other(rung):
    run("import builtins, json, random\nbuiltins.print = None\njson.dumps = None\nrandom.seed(1)", rung)
    first = run("import random; print(random.random())", rung)[1]
    second = run("import random; print(random.random())", rung)[1]
    assert first and second and first != second


def test_same_program_same_order_of_sets(rung):
    program = "print(list({'apple', 'pear', 'plum', 'fig', 'lime'}))"
    outputs = {run(program, rung)[1] for _ in range(2)}
    sandbox.close_idle()
    assert outputs == {run(program, rung)[1]}


# --- the life of a sandbox -------------------------------------------------------------------------------------------


def test_many_threads_at_once(rung):
    outputs = [b""] * 24

    def work(i):
        outputs[i] = run("print(int(input()) ** 2)", rung, stdin=str(i).encode())[1]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(outputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == [b"%d\n" % i**2 for i in range(len(outputs))]


def test_a_dead_zygote_costs_one_program_at_most_and_takes_it_along(rung):
    with start_program("import time; time.sleep(30)", rung=rung) as running:
        while not (programs := sandbox._children(running._zygote._pid)):
            time.sleep(0.01)
        os.kill(running._zygote._pid, signal.SIGKILL)
        assert running.wait().reason == "lost"
    assert len(programs) == 1 and ends_soon(programs[0])
    assert run("print(1)", rung)[1] == b"1\n"
    for zygote in sandbox._idle[rung, False, False]:
        os.kill(zygote._pid, signal.SIGKILL)
    for _ in range(3):
        assert grade_program("print(1)", [{"input": "", "output": "1"}], rung=rung).correct


def test_a_forked_parent_has_zygotes_of_its_own(rung):
    run("print(1)", rung)
    child = os.fork()
    if child == 0:
        output = b""
        try:
            output = run("print(2)", rung)[1]
            sandbox.close_idle()
        finally:
            os._exit(0 if output == b"2\n" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert run("print(3)", rung)[1] == b"3\n"


def test_a_killed_parent_takes_its_programs_along(rung):
    script = (
        "import sys, time\nfrom evals.grading import sandbox\n"
        f"with sandbox.start_program('while True: pass', rung={rung!r}) as running:\n"
        "    while not (children := sandbox._children(running._zygote._pid)): time.sleep(0.01)\n"
        "    print(running._zygote._pid, *children, flush=True)\n"
        "    running.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    assert len(pids) == 2 and all(ends_soon(pid) for pid in pids)


def ends_soon(pid):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


# --- which rung ------------------------------------------------------------------------------------------------------


def test_no_rung_is_none_unless_named():
    assert sandbox.available_rung() in (*RUNGS, None)
    assert sandbox.choose_rung("none") == "none"
    with pytest.raises(ValueError, match="unknown sandbox rung 'docker'"):
        sandbox.choose_rung("docker")
    assert [status.name for status in sandbox.rung_report()] == ["bubblewrap", "landlock", "none"]


def test_a_machine_without_bubblewrap_uses_landlock_and_says_why(monkeypatch):
    if sandbox._fault("landlock") is not None:
        pytest.skip("no Landlock here")
    monkeypatch.setenv("PATH", "/nowhere")
    sandbox._fault.cache_clear()
    try:
        assert sandbox.available_rung() == "landlock"
        status = sandbox.rung_report()[0]
        assert (status.usable, status.reason) == (False, "the program `bwrap` is not installed")
        assert "apt install bubblewrap" in status.remedy
        with pytest.raises(SandboxUnavailable, match="apt install bubblewrap"):
            grade_program("print(1)", [{"input": "", "output": "1"}], rung="bubblewrap")
        monkeypatch.setattr(sandbox.landlock, "abi", lambda: 0)
        sandbox._fault.cache_clear()
        with pytest.raises(SandboxUnavailable, match=r"no sandbox to run programs in \(bubblewrap: .*landlock: "):
            grade_program("print(1)", [{"input": "", "output": "1"}])
    finally:
        sandbox._fault.cache_clear()


def test_bubblewrap_holds_without_landlock_inside(monkeypatch, tmp_path):
    if sandbox._fault("bubblewrap") is not None:
        pytest.skip("no bubblewrap here")
    monkeypatch.setattr(sandbox.landlock, "abi", lambda: 0)
    sandbox.close_idle()
    program = fill_in(ATTACKS["write outside"] + ATTACKS["read /etc/passwd"], tmp_path / "precious", 1)
    assert run(program, "bubblewrap")[1] == b""
    assert run("import os; print(sorted(os.listdir('/')), os.getcwd())", "bubblewrap")[1].endswith(b"/tmp\n")
    sandbox.close_idle()


def test_rung_none_kills_the_whole_tree(tmp_path):
    trace = tmp_path / "survivor"
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        time.sleep(0.7)\n        open({str(trace)!r}, 'w')\n"
        "    os._exit(0)\n"
        "print('main')\n"
    )
    ending, output = run(program, "none")
    assert (ending.reason, output) == ("exited", b"main\n")
    time.sleep(1)
    assert not trace.exists()
    assert run("while True: pass", "none", limits=Limits(cpu_s=1))[0].reason == "timeout"
