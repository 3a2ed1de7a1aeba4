"""The first process of a sandbox: starts the model's program, watches its whole tree, ends it.

Runs by path as `python -I -S sandbox_supervisor.py LIMITS STATUS_FD -- COMMAND..`, so it imports
the standard library alone. As PID 1 of its namespace it cannot be killed from inside, and when it
ends, the kernel kills whatever is left. Consumes the limits as JSON, produces one line on the
status descriptor: `exit CODE`, `limit NAME` or `error TEXT`. Waits for the program or for a limit.
Any error of the supervisor itself ends the sandbox too.

The tree is summed every few milliseconds, which no process-wide limit can do. Between two
measurements the kernel bounds memory and CPU time of one process, and the number of processes,
which is exact when the program runs as a user id that no other call has.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time

PERIOD_S = 0.02
NICE = 5
MAX_OPEN_FILES = 128
MAX_REAPED = 1000
KILL_ROUNDS = 50
PAGE = os.sysconf("SC_PAGE_SIZE")
ADDRESS_SPACE = 32 << 30
"""Addresses of a process beyond its memory: threads and allocators reserve more than they use."""
TABLE_SHIFT = 9
"""An address space needs at most this share of itself, 2**-9, as page tables."""
SOCKET_BYTES, TCP_BYTES = 1 << 18, 16 << 20
"""Upper bounds of what a socket can hold: one that is not TCP, whose buffers keep the kernel's default
size, and one that is."""
TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


class Tree:
    """Sums over every process of the sandbox; CPU time of processes that are gone stays counted."""

    def __init__(self, *, is_init: bool, folder: str) -> None:
        self._is_init = is_init
        self._folder = folder
        self._cpu_by_process: dict[tuple[int, bytes], float] = {}
        self.tasks = self.memory_bytes = self.files = 0
        self.cpu_s = 0.0

    def num_processes(self) -> int:
        """Number of other processes of the namespace; 0 where others share /proc."""
        return sum(name.isdigit() for name in os.listdir("/proc")) - 1 if self._is_init else 0

    def look(self) -> list[int]:
        """Read the tree once. Memory includes the content of files in the working directory."""
        tasks = memory = 0
        alive_cpu = 0.0
        pids: list[int] = []
        for pid, fields in self._processes():
            tasks += int(fields[17])
            memory += max(int(fields[21]), 0) * PAGE + (int(fields[20]) >> TABLE_SHIFT)
            own = (int(fields[11]) + int(fields[12])) / TICKS
            alive_cpu += own + (int(fields[13]) + int(fields[14])) / TICKS
            self._cpu_by_process[pid, fields[19]] = own
            pids.append(pid)
        times = os.times()
        alive_cpu += times.children_user + times.children_system
        disk = os.statvfs(self._folder) if self._is_init else None
        held = (disk.f_blocks - disk.f_bfree) * disk.f_frsize if disk else 0
        self.files = disk.f_files - disk.f_ffree if disk else 0
        self.tasks, self.memory_bytes = tasks, memory + held + self._sockets(TCP_BYTES)
        self.cpu_s = max(alive_cpu, sum(self._cpu_by_process.values()), self.cpu_s)
        return pids

    def shared_memory_bytes(self, pids: list[int], most: float) -> int:
        """Measure memory with shared pages counted once, and what page tables and TCP really hold; slower,
        for cases in doubt. The pages, which take longest, are read if the rest is within `most`."""
        disk = os.statvfs(self._folder) if self._is_init else None
        total = (disk.f_blocks - disk.f_bfree) * disk.f_frsize if disk else 0
        total += self._sockets(0) + (_queued_bytes() if self._is_init else 0)
        total += sum(map(_table_bytes, pids))
        return total + (sum(map(_proportional_bytes, pids)) if total <= most else 0)

    def _sockets(self, tcp_bytes: int) -> int:
        """Bound the memory of sockets, which belongs to no single process; 0 if others share them."""
        if not self._is_init:
            return 0
        used = tcp = 0
        with open("/proc/net/sockstat", "rb") as file:
            for line in file:
                words = line.split()
                if words[0] == b"sockets:":
                    used = int(words[2])
                elif words[0] == b"TCP:":
                    tcp = int(words[2]) + int(words[6])
        return max(used - tcp, 0) * SOCKET_BYTES + tcp * tcp_bytes

    def _processes(self) -> list[tuple[int, list[bytes]]]:
        """Yield process id and the fields of /proc/PID/stat after the name, for all other
        processes."""
        found: dict[int, list[bytes]] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid():
                continue
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    found[int(name)] = file.read().rpartition(b")")[2].split()
            except OSError as error:
                if isinstance(error, (FileNotFoundError, ProcessLookupError)):
                    continue
                raise
        if self._is_init:
            return list(found.items())
        family = {os.getpid()}
        while grown := {p for p, f in found.items() if int(f[1]) in family} - family:
            family |= grown
        return [(pid, fields) for pid, fields in found.items() if pid in family]


def _proportional_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        pass
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _table_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((int(x.split()[1]) * 1024 for x in file if x.startswith(b"VmPTE:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _queued_bytes() -> int:
    """Sum what TCP holds, sent and not yet received."""
    total = 0
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", "rb") as file:
                for line in list(file)[1:]:
                    sent, _, received = line.split()[4].partition(b":")
                    total += int(sent, 16) + int(received, 16)
        except FileNotFoundError:  # a kernel without IPv6
            continue
    return total


def exceeded(tree: Tree, limits: dict[str, float], started: float) -> str | None:
    """Return the name of the first limit that the tree exceeds, or None."""
    if tree.num_processes() > limits["processes"]:  # cheap: a fork bomb outruns a full measurement
        return "processes"
    pids = tree.look()
    if tree.tasks > limits["processes"]:
        return "processes"
    most = limits["memory_bytes"]
    if tree.memory_bytes > most and tree.shared_memory_bytes(pids, most) > most:
        return "memory"
    if tree.files > limits["files"]:
        return "files"
    if tree.cpu_s > limits["cpu_s"]:
        return "cpu"
    if time.monotonic() - started > limits["wall_s"]:
        return "wall"
    return None


def start(command: list[str], limits: dict[str, float], *, is_init: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for name, value in (
            ("CORE", 0),
            ("DATA", limits["memory_bytes"]),
            ("AS", limits["memory_bytes"] + ADDRESS_SPACE),
            ("FSIZE", limits["file_bytes"]),
            ("CPU", limits["cpu_s"] + 1),
            ("NOFILE", MAX_OPEN_FILES),
            ("MEMLOCK", 65536),
            ("MSGQUEUE", 0),
        ):
            number = getattr(resource, "RLIMIT_" + name)
            resource.setrlimit(number, (int(value), int(value)))
        user = int(limits["user"])
        if user or is_init:  # elsewhere it would count all processes of our own user
            most = int(limits["processes"]) + (0 if user else 8)
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        os.nice(NICE)
        os.setsid()
        if user:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        for name in os.listdir("/proc/self/fd"):  # bubblewrap leaves some of its own open
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.execv(command[0], command)
    finally:
        os._exit(127)


def protect(*, is_init: bool) -> None:
    """Prevent the program from tracing or reading this process. Outside a namespace, adopt orphans,
    and end with the parent."""
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    if not is_init:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, _stop)


def _stop(*_: object) -> None:
    sys.exit("stopped")


def watch(main: int, limits: dict[str, float], tree: Tree) -> str:
    """Wait until the program ends or a limit is hit; return which."""
    started = time.monotonic()
    while True:
        for _ in range(MAX_REAPED):
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == main:
                return f"exit {os.waitstatus_to_exitcode(status)}"
            if pid == 0:
                break
        limit = exceeded(tree, limits, started)
        if limit is not None:
            return f"limit {limit}"
        signal.sigtimedwait([signal.SIGCHLD], PERIOD_S)


def kill(tree: Tree) -> None:
    """Kill remaining processes, as the kernel does for PID 1 at exit."""
    for _ in range(KILL_ROUNDS):
        pids = tree.look()
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def main() -> None:
    limits, status, command = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[4:]
    os.set_inheritable(status, False)
    is_init = os.getpid() == 1
    signal.signal(signal.SIGINT, signal.SIG_DFL if is_init else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    protect(is_init=is_init)
    tree = Tree(is_init=is_init, folder=os.getcwd())
    try:
        end = watch(start(command, limits, is_init=is_init), limits, tree)
    except BaseException as error:
        end = f"error {type(error).__name__}: {error}"
    os.write(status, f"{end}\n".encode())
    if not is_init:
        kill(tree)
    os._exit(0)


if __name__ == "__main__":
    main()
