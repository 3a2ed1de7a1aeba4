# ends: error
# ruff: noqa
# Families and kinds of sockets beyond local ones.
import socket

for family in range(64):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        is_local = family in (socket.AF_INET, socket.AF_INET6) and kind in (1, 2)
        if is_local or family == socket.AF_UNIX:
            continue
        for make in (socket.socket, socket.socketpair):
            try:
                made = make(family, kind)
            except OSError:
                continue
            print("ESCAPED:", make, family, kind)
for protocol in (1, 255):
    try:
        socket.socket(socket.AF_INET, socket.SOCK_RAW, protocol)
    except OSError:
        continue
    print("ESCAPED: raw", protocol)
raise SystemExit("all refused")
