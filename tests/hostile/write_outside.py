# ends: error
# ruff: noqa
import os

places = ["/escaped", "/code/escaped", "/code/main.py", "/code/supervisor.py", "/lib/escaped"]
places += ["/python/bin/escaped", "/usr/escaped", "/root/escaped", "/etc/escaped", "/dev/escaped"]
places += ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/1/mem"]
places += ["/proc/1/oom_score_adj", "/proc/self/oom_score_adj", "/sys/fs/cgroup/escaped"]
places += ["../escaped", "/proc/1/cwd/../escaped", "/proc/1/root/escaped"]
for place in places:
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_WRONLY):
        try:
            os.close(os.open(place, flags, 0o777))
        except OSError:
            continue
        print("ESCAPED:", place)
raise SystemExit("all refused")
