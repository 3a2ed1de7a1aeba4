# ends: error
# ruff: noqa
import os
import stat

known = {"null", "zero", "full", "random", "urandom", "fd", "stdin", "stdout", "stderr", "shm"}
if extra := set(os.listdir("/dev")) - known:
    print("ESCAPED:", extra)
for kind, number in ((stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (1, 1)), (stat.S_IFCHR, (10, 200))):
    try:
        os.mknod("device", kind | 0o666, os.makedev(*number))
    except OSError:
        continue
    print("ESCAPED: device", number)
for name in ("tty", "ptmx", "console"):
    try:
        os.open(f"/dev/{name}", os.O_RDWR)
    except OSError:
        continue
    print("ESCAPED:", name)
try:
    os.openpty()
    print("ESCAPED: a terminal")
except OSError:
    raise SystemExit("all refused")
