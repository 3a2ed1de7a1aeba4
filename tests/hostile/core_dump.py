# ends: error
# ruff: noqa
import os
import resource

try:
    resource.setrlimit(resource.RLIMIT_CORE, (2**20, 2**20))
    print("ESCAPED: the limit was raised")
except ValueError:
    pass
child = os.fork()
if child == 0:
    os.abort()
_, status = os.waitpid(child, 0)
if os.WCOREDUMP(status) or os.listdir():
    print("ESCAPED: a core was dumped")
os.abort()
