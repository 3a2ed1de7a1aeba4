# ends: error memory processes cpu
# ruff: noqa
# Descriptors beyond the limit, kept in messages that nobody reads.
import array
import os
import socket

kept = 0
left, right = socket.socketpair()
left.setblocking(False)
try:
    for _ in range(100_000):
        opened = os.open("file", os.O_RDWR | os.O_CREAT)
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [opened]))])
        os.close(opened)
        kept += 1
except OSError:
    if kept > 4096:
        print("ESCAPED:", kept)
raise SystemExit("refused")
