# ends: files cpu
# ruff: noqa
import os

for number in range(10_000_000):
    os.mkdir(f"folder{number}")
