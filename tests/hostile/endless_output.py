# ends: output
# ruff: noqa
import sys

while True:
    sys.stdout.write("x" * 2**16)
    sys.stderr.write("y" * 2**16)
