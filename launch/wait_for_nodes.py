"""Wait until a Ray cluster has a number of nodes:  python launch/wait_for_nodes.py NUM_NODES"""

import logging
import sys
import time

import ray

TIMEOUT_S = 600.0
PAUSE_S = 2.0


def wait_for(num_nodes: int) -> bool:
    """Return whether the nodes joined the cluster of RAY_ADDRESS in time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            ray.init(address="auto", logging_level=logging.ERROR)
            alive = [node for node in ray.nodes() if node["Alive"]]
            if len(alive) >= num_nodes:
                return True
        except ConnectionError:
            pass  # the head has not started yet
        finally:
            ray.shutdown()
        time.sleep(PAUSE_S)
    return False


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    if not wait_for(wanted):
        sys.exit(f"{wanted} nodes did not join the cluster within {TIMEOUT_S:g} s")
