# ends: error
# ruff: noqa
import ctypes
import os
import socket
import time

libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "clock_settime": lambda: time.clock_settime(time.CLOCK_REALTIME, 0),
    "sethostname": lambda: socket.sethostname("other"),
    "chroot": lambda: os.chroot("/work"),
    "reboot": lambda: libc.reboot(0) and os.stat("/none"),
    "adjust": lambda: (
        libc.clock_adjtime(0, ctypes.create_string_buffer(b"\1", 512)) < 0 and os.stat("/none")
    ),
    "setdomainname": lambda: libc.setdomainname(b"x", 1) and os.stat("/none"),
}
for name, call in calls.items():
    try:
        call()
    except OSError:
        continue
    print("ESCAPED:", name)
if socket.gethostname() != "sandbox":
    print("ESCAPED: the host's name")
raise SystemExit("all refused")
