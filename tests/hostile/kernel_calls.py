# ends: error
# ruff: noqa
# Interfaces of the kernel that no namespace covers; numbers of x86_64.
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "io_uring": (425, 8, ctypes.create_string_buffer(256)),
    "bpf": (321, 0, ctypes.create_string_buffer(128), 128),
    "perf_event_open": (298, ctypes.create_string_buffer(b"\1", 128), 0, -1, -1, 0),
    "userfaultfd": (323, 1),
    "add_key": (248, b"user", b"name", b"x", 1, -4),
    "keyctl": (250, 0, -3, 1),
    "request_key": (249, b"user", b"name", None, -4),
    "kexec_load": (246, 0, 0, None, 0),
    "init_module": (175, None, 0, b""),
    "syslog": (103, 10, None, 0),
    "kcmp": (312, os.getpid(), 1, 0, 0, 0),
    "personality": (135, 0x0040000),
    "open_by_handle_at": (304, -100, None, 0),
    "quotactl": (179, 0, None, 0, None),
    "acct": (163, None),
    "swapoff": (168, b"/swap"),
    "fanotify_init": (300, 0, 0),
    "lookup_dcookie": (212, 0, None, 0),
    "clone3": (435, ctypes.create_string_buffer(88), 88),
    "x32": (0x40000000 + 39,),
}
for name, (number, *arguments) in calls.items() if os.uname().machine == "x86_64" else ():
    if libc.syscall(number, *arguments) >= 0:
        print("ESCAPED:", name)
    elif ctypes.get_errno() not in (1, 38):
        print("ESCAPED:", name, "reached the kernel with error", ctypes.get_errno())
raise SystemExit("all refused")
