# ends: error
# ruff: noqa
# Sizes that are claimed, not written.
import os
import resource

descriptor = os.open("file", os.O_RDWR | os.O_CREAT)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
import signal

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for size in (most + 1, 2**40, 2**62):
    for call in (
        lambda: os.truncate("file", size),
        lambda: os.posix_fallocate(descriptor, 0, size),
    ):
        try:
            call()
        except OSError:
            continue
        print("ESCAPED:", size)
raise SystemExit("all refused")
