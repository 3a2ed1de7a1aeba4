# ends: error
# ruff: noqa
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):
    if libc.unshare(flag) == 0:
        print("ESCAPED: unshare", hex(flag))
    child = libc.syscall(56, flag | 17, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1
    if child == 0:
        os._exit(0)
    if child > 0:
        print("ESCAPED: clone", hex(flag))
if libc.mount(b"none", b"/work", b"tmpfs", 0, None) == 0 or libc.umount2(b"/work", 2) == 0:
    print("ESCAPED: mount")
if libc.chroot(b"/work") == 0:
    print("ESCAPED: chroot")
raise SystemExit("all refused")
