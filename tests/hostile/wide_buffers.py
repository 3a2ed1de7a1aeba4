# ends: error
# ruff: noqa
# Buffers that no measurement sees must keep their size, and pipes are few and small.
import fcntl
import os
import socket

first, second = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    try:
        first.setsockopt(socket.SOL_SOCKET, option, 2**30)
    except OSError:
        continue
    print("ESCAPED: socket option", option)
first.settimeout(1)  # others still work
first.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
total = 0
try:
    while True:
        _, end = os.pipe()
        os.set_blocking(end, False)
        try:
            fcntl.fcntl(end, 1031, 2**20)  # F_SETPIPE_SZ
        except OSError:
            pass
        try:
            while True:
                total += os.write(end, bytes(2**16))
        except BlockingIOError:
            continue
except OSError:
    if total > 2**27:
        print("ESCAPED: pipes hold", total)
raise SystemExit("all refused")
