# ends: error
# ruff: noqa
# The old and the new calls that change what is mounted; numbers of both architectures.
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "fsopen": (430, b"tmpfs", 0),
    "open_tree": (428, -100, b"/", 1),
    "move_mount": (429, -100, b"/work", -100, b"/python", 0),
    "fsmount": (432, 0, 0, 0),
    "fspick": (433, -100, b"/", 0),
    "mount_setattr": (442, -100, b"/", 0, ctypes.create_string_buffer(32), 32),
    "pivot_root": (155 if os.uname().machine == "x86_64" else 41, b".", b"."),
}
for name, (number, *arguments) in calls.items():
    if libc.syscall(number, *arguments) >= 0:
        print("ESCAPED:", name)
for source, target, kind, flags in (
    (b"none", b"/work", b"tmpfs", 0),
    (b"/proc", b"/work", None, 4096),
    (None, b"/", None, 32),
    (b"sysfs", b"/work", b"sysfs", 0),
):
    if libc.mount(source, target, kind, flags, None) == 0:
        print("ESCAPED: mount", kind)
raise SystemExit("all refused")
