# ends: wall
# ruff: noqa
# A program that stops itself, and would not hear SIGTERM.
import os
import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGSTOP)
