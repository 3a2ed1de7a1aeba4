# ends: memory
# ruff: noqa
# Bytes on their way between connections of the box itself.
import os
import socket
import time

for _ in range(8):
    if os.fork() == 0:
        break
held, server = [], socket.create_server(("127.0.0.1", 0))
try:
    while True:
        held += [socket.create_connection(server.getsockname()), server.accept()[0]]
        held[-2].setblocking(False)
        try:
            while True:
                held[-2].send(bytes(2**16))
        except BlockingIOError:
            continue
except OSError:
    time.sleep(3600)
