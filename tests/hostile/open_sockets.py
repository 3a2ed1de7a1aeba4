# ends: error
# ruff: noqa
# Standard input: a TCP port of the host, a path and an abstract name of unix sockets.
import socket
import sys

port, path, name = (sys.stdin.read().split("\n") + ["80", "/run/x", "x"])[:3]
tries = [(socket.AF_UNIX, path), (socket.AF_UNIX, "\0" + name), (socket.AF_VSOCK, (2, 1024))]
tries += [
    (socket.AF_INET, (host, int(port or 80))) for host in ("127.0.0.1", "10.0.0.1", "1.1.1.1")
]
tries += [(socket.AF_INET6, ("::1", int(port or 80)))]
for family, address in tries:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as client:
            client.settimeout(1)
            client.connect(address)
    except OSError:
        continue
    print("ESCAPED:", family, address)
for family, kind in ((socket.AF_NETLINK, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW)):
    try:
        socket.socket(family, kind).close()
    except OSError:
        continue
    print("ESCAPED:", family)
raise SystemExit("all refused")
