# ends: error
# ruff: noqa
# Programs of the host, of descriptors and of the working directory keep the box's rules.
import os
import subprocess
import sys

for program in ("/bin/sh", "/usr/bin/env", "/bin/busybox", "/usr/bin/sudo", "/usr/bin/bwrap"):
    if os.path.exists(program):
        print("ESCAPED:", program)
code = "import os; print([l for l in open('/proc/self/status') if l.startswith(('CapEff', 'Seccomp:'))])"
with open("copy", "wb") as file:
    file.write(f"#!/python/bin/python\n{code}".encode())
os.chmod("copy", 0o4755)
for command in (["./copy"], [sys.executable, "-c", code]):
    shown = subprocess.run(command, capture_output=True, text=True, env={}).stdout
    if shown and ("Seccomp:\\t2" not in shown or "CapEff:\\t0000000000000000" not in shown):
        print("ESCAPED:", command, shown)
raise SystemExit("all refused")
