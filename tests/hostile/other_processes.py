# ends: error
# ruff: noqa
# /proc shows the first process and this one, and of the first nothing that it holds.
import os

pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
if pids != [1, os.getpid()]:
    print("ESCAPED: processes", pids)
for name in (
    "mem",
    "environ",
    "maps",
    "smaps",
    "syscall",
    "stack",
    "auxv",
    "io",
    "wchan",
    "pagemap",
):
    try:
        if os.read(os.open(f"/proc/1/{name}", os.O_RDONLY), 100).strip(b"0"):
            print("ESCAPED: /proc/1/" + name)
    except OSError:
        continue
for name in ("fd", "map_files", "task/1/fd", "cwd", "root", "ns"):
    try:
        os.listdir(f"/proc/1/{name}")
    except OSError:
        continue
    if name != "ns":
        print("ESCAPED: /proc/1/" + name)
raise SystemExit("all refused")
