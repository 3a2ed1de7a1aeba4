"""Preparation of every process of a run, before anything in it makes a call."""

import ray

from raylearner import job_variables, network


def prepare_process() -> None:
    """Take the variables that were handed on to the job, then reach the cluster's nodes directly."""
    job_variables.take()
    reach_nodes_directly()


def reach_nodes_directly() -> None:
    """Call the nodes of the cluster, which this process has joined, without a proxy."""
    nodes = ray.nodes() if network.are_set() else []
    hosts = {node[key] for node in nodes for key in ("NodeManagerAddress", "NodeManagerHostname")}
    network.keep_direct(*sorted(hosts))
