# ends: wall
# ruff: noqa
import os
import time

for descriptor in range(3, 100):
    try:
        os.close(descriptor)
    except OSError:
        pass
os.close(1)
os.close(2)
time.sleep(3600)
