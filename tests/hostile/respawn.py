# ends: wall cpu processes
# ruff: noqa
# Each process lives only long enough to start the next one.
import os
import time

if os.fork():
    time.sleep(3600)
while True:
    if os.fork():
        os._exit(0)
