# ends: error
# ruff: noqa
# Tracing the own child, and reading others without tracing.
import ctypes
import os
import signal

libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if child == 0:
    signal.pause()
for pid in (child, 1):
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, 0, 0) == 0:
            print("ESCAPED: ptrace", request, pid)
    held = ctypes.create_string_buffer(16)
    if libc.process_vm_readv(pid, held, 1, held, 1, 0) >= 0:
        print("ESCAPED: process_vm_readv", pid)
    descriptor = libc.syscall(434, pid, 0)
    if descriptor >= 0 and libc.syscall(438, descriptor, 1, 0) >= 0:
        print("ESCAPED: pidfd_getfd", pid)
if libc.ptrace(0, 0, 0, 0) == 0:
    print("ESCAPED: PTRACE_TRACEME")
os.kill(child, signal.SIGKILL)
raise SystemExit("all refused")
