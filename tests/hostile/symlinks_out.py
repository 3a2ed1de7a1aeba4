# ends: error
# ruff: noqa
# Links of every kind that point out of the box, followed by path and by descriptor.
import os

targets = ["/etc/passwd", "/root", "/home", "/proc/1/root/etc/passwd", "/proc/1/cwd", "/sys"]
targets += ["../../../../../etc/passwd", "/proc/self/root/etc", "/var/run", "/dev/mem"]
for number, target in enumerate(targets):
    os.symlink(target, f"link{number}")
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        try:
            os.close(os.open(f"link{number}", flags))
        except OSError:
            continue
        print("ESCAPED:", target)
root = os.open("/", os.O_RDONLY)
for _ in range(40):
    root = os.open("..", os.O_RDONLY, dir_fd=root)
if set(os.listdir(root)) != set(os.listdir("/")):
    print("ESCAPED: above the root")
raise SystemExit("all refused")
