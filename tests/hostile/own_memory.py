# ends: error
# ruff: noqa
# Writing through /proc, to this process as to the kernel.
import os

names = ["mem", "comm", "clear_refs", "oom_score_adj", "coredump_filter", "loginuid", "uid_map"]
names += ["gid_map", "setgroups", "attr/current", "timerslack_ns", "autogroup", "sched"]
places = [f"/proc/self/{name}" for name in names]
for folder, _, files in os.walk("/proc/sys"):
    places += [os.path.join(folder, name) for name in files[:5]]
for place in places:
    try:
        os.close(os.open(place, os.O_WRONLY))
    except OSError:
        continue
    print("ESCAPED:", place)
raise SystemExit("all refused")
