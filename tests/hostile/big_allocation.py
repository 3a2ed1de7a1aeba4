# ends: error
# ruff: noqa
bytearray(10 * 2**30)
