# ends: error
# ruff: noqa
# What the kernel tells of the machine, beside numbers that every program may know.
import os

places = ["/sys", "/sys/kernel", "/sys/fs/cgroup", "/proc/kcore", "/proc/kmsg", "/proc/keys"]
places += ["/proc/sysrq-trigger", "/proc/kpagemap", "/proc/kpagecount", "/proc/vmallocinfo"]
places += ["/proc/slabinfo", "/proc/acpi", "/proc/scsi"]
for place in places:
    try:
        found = os.listdir(place) if os.path.isdir(place) else os.read(os.open(place, 0), 100)
    except OSError:
        continue
    if found:
        print("ESCAPED:", place)
with open("/proc/kallsyms") as symbols:
    if any(int(line.split()[0], 16) for line, _ in zip(symbols, range(100))):
        print("ESCAPED: kernel addresses")
raise SystemExit("all refused")
