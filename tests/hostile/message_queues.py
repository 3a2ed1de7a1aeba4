# ends: error
# ruff: noqa
# Kernel objects that nobody is charged for.
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "msgget": lambda: libc.msgget(0, 0o1666),
    "semget": lambda: libc.semget(0, 100, 0o1666),
    "shmget": lambda: libc.shmget(0, 4096, 0o1666),
    "mq_open": lambda: libc.syscall(240, b"q", 0o102, 0o666, 0),
    "memfd_secret": lambda: libc.syscall(447, 0),
    "io_setup": lambda: libc.syscall(206, 60000, ctypes.byref(ctypes.c_long())),
    "inotify": lambda: libc.inotify_init(),
}
for name, call in calls.items():
    if call() >= 0:
        print("ESCAPED:", name)
raise SystemExit("all refused")
