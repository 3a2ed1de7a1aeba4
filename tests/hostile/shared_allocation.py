# ends: memory cpu
# ruff: noqa
# Shared pages belong to no process's private data.
import mmap

held = mmap.mmap(-1, 10 * 2**30, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
for place in range(0, len(held), 4096):
    held[place] = 1
