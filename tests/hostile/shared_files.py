# ends: memory error cpu
# ruff: noqa
# Memory in deleted files and in what used to be /dev/shm.
import mmap
import os
import time

held = []
for number in range(64):
    name = f"/dev/shm/part{number}"
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT)
    os.truncate(descriptor, 2**20)
    os.unlink(name)
    held.append(mmap.mmap(descriptor, 2**20))
    held[-1].write(bytes(range(256)) * 2**12)
time.sleep(3600)
