# ends: cpu wall
# ruff: noqa
# The children ignore every signal that they can and their parent does not count them.
import os
import signal

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(6):
    if os.fork() == 0:
        for number in range(1, 30):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
        break
while True:
    pass
