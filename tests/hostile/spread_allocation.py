# ends: memory
# ruff: noqa
import os
import time

for _ in range(20):
    if os.fork() == 0:
        held = bytearray(b"x") * (200 * 2**20)
        time.sleep(3600)
time.sleep(3600)
