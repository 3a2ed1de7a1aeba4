# ends: error
# ruff: noqa
import os

sources = ["/code/main.py", "/code/supervisor.py", "/python/bin/python", "/proc/self/exe"]
sources += ["/proc/self/fd/0", "/dev/null", "/proc/1/exe"]
for source in sources:
    for follow in (True, False):
        try:
            os.link(source, f"taken{len(os.listdir())}", follow_symlinks=follow)
        except OSError:
            continue
        print("ESCAPED:", source)
raise SystemExit("all refused")
