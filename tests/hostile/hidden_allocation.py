# ends: error
# ruff: noqa
# Memory that no process maps: anonymous files and System V segments.
import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0, 10 * 2**30, 0o1666) >= 0:
    print("ESCAPED: a System V segment")
os.write(os.memfd_create("held"), b"x" * 2**20)
print("ESCAPED: an anonymous file")
