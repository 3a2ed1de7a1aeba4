# ends: wall cpu
# ruff: noqa
while True:
    pass
