# ends: error
# ruff: noqa
# Nothing leaves, and no name is resolved; loopback is the box's own.
import socket
import sys

port = int((sys.stdin.read().split("\n") + ["9000"])[0] or 9000)
for host in ("10.0.0.1", "1.1.1.1", "169.254.169.254", "255.255.255.255", "224.0.0.1"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        try:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            client.sendto(b"x", (host, 53))
        except OSError:
            continue
        print("ESCAPED:", host)
for name in ("localhost.localdomain", "example.org", "metadata.google.internal"):
    try:
        socket.gethostbyname(name)
    except OSError:
        continue
    print("ESCAPED:", name)
with socket.create_server(("127.0.0.1", port)) as own:  # free here, taken on the host
    socket.create_connection(own.getsockname()).close()
raise SystemExit("all refused")
