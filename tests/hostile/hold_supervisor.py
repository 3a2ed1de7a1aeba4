# ends: error
# ruff: noqa
# Starving, tracing, limiting or reading the first process.
import ctypes
import os
import resource

libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "renice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "renice the user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "pin": lambda: os.sched_setaffinity(1, {0}),
    "limit": lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)),
    "schedule": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "memory": lambda: os.open("/proc/1/mem", os.O_RDWR),
    "descriptors": lambda: [
        os.open(f"/proc/1/fd/{n}", os.O_WRONLY) for n in os.listdir("/proc/1/fd")
    ],
    "raise own limit": lambda: resource.setrlimit(resource.RLIMIT_DATA, (-1, -1)),
}
for name, call in calls.items():
    try:
        call()
    except (OSError, ValueError):
        continue
    print("ESCAPED:", name)
if libc.ptrace(16, 1, 0, 0) == 0:
    print("ESCAPED: ptrace")
raise SystemExit("all refused")
