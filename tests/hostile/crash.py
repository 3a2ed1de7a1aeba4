# ends: error
# ruff: noqa
import ctypes

ctypes.string_at(0)
