# ends: error
# ruff: noqa
# Standard input names more files to try, one a line.
import glob
import os
import sys

files = sys.stdin.read().split("\n")
files += glob.glob("/proc/*/environ") + glob.glob("/proc/*/task/*/environ")
files += glob.glob("/proc/*/cmdline") + glob.glob("/proc/*/mem") + glob.glob("/proc/*/fd/*")
files += ["/proc/kcore", "/etc/passwd", "/etc/shadow", "/root/.ray/auth_token"]
files += [os.path.expanduser("~/.ray/auth_token"), "/run/secrets", "/var/run/docker.sock"]
for folder in (
    "/root",
    "/home",
    "/etc",
    "/var",
    "/run",
    "/usr",
    "/opt",
    "/sys",
    "/mnt",
    "/dev/shm",
):
    for parent, _, names in os.walk(folder):
        files += [os.path.join(parent, name) for name in names]
print(dict(os.environ))
for file in filter(None, files):
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        print(file, os.read(descriptor, 4000))
    except OSError:
        continue
raise SystemExit("that was all")
