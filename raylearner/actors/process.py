"""Setup of every process of a run, before its first network call."""

import ray

from raylearner import job_variables, network, stacks


def prepare_process() -> None:
    """Set the variables that were passed to the job, exempt the cluster's nodes from proxies, and let
    others request its stacks."""
    job_variables.take()
    stacks.register()
    reach_nodes_directly()


def reach_nodes_directly() -> None:
    """Call the nodes of the cluster, which this process has joined, without a proxy."""
    nodes = ray.nodes() if network.are_set() else []
    hosts = {node[key] for node in nodes for key in ("NodeManagerAddress", "NodeManagerHostname")}
    network.keep_direct(*sorted(hosts))
