# ends: files error cpu
# ruff: noqa
# Inodes and names, without one byte of content.
import os

for number in range(10_000_000):
    os.symlink("x" * 4000, f"{'n' * 200}{number}")
