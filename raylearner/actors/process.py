"""What every process of a run does first, before anything in it makes a call."""

import ray

from raylearner import job_variables, network


def prepare() -> None:
    """Takes the variables that were handed on to the job, then calls its own addresses directly."""
    job_variables.take()
    reach_nodes_directly()


def reach_nodes_directly() -> None:
    """The nodes of the cluster, which this process has joined, are called without a proxy."""
    nodes = ray.nodes() if network.are_set() else []
    hosts = {node[key] for node in nodes for key in ("NodeManagerAddress", "NodeManagerHostname")}
    network.keep_direct(*sorted(hosts))
