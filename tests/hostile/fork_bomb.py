# ends: processes error cpu
# ruff: noqa
import os

while True:
    os.fork()
