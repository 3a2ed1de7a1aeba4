# ends: error
# ruff: noqa
# Nothing but three streams is inherited, and the input cannot be changed.
import mmap
import os

held = [int(name) for name in os.listdir("/proc/self/fd")]
for descriptor in held[:]:
    try:
        os.fstat(descriptor)
    except OSError:
        held.remove(descriptor)
if sorted(held) != [0, 1, 2]:
    print("ESCAPED:", held)
for call in (
    lambda: os.write(0, b"x"),
    lambda: os.truncate(0, 1000),
    lambda: mmap.mmap(0, 1, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE),
    lambda: os.write(os.open("/proc/self/fd/0", os.O_RDWR), b"x"),
):
    try:
        call()
    except (OSError, ValueError):
        continue
    print("ESCAPED: the input was changed")
raise SystemExit("all refused")
