# ends: ok
# ruff: noqa
# Daemons that would stay behind.
import os
import time

for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(0.1)
        os._exit(0)
