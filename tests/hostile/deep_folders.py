# ends: files error cpu
# ruff: noqa
import os

while True:
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
