# ends: error
# ruff: noqa
# Daemons without streams, which ignore every signal, while the program fails.
import os
import signal

for _ in range(6):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in range(1, 30):
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN)
        os.closerange(0, 64)
        while True:
            signal.pause()
raise SystemExit("gone")
