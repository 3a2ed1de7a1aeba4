# ends: error
# ruff: noqa
import os

os.write(1, bytes(range(256)) * 10)
os.write(2, b"\xff\xfe\x00limit memory\n")
os._exit(77)
