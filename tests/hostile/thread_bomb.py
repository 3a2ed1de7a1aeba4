# ends: processes error cpu
# ruff: noqa
import threading
import time

threading.stack_size(1 << 16)
while True:
    threading.Thread(target=time.sleep, args=(60,)).start()
