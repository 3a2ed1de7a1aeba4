"""Proxies: one rule for every client, and for every process of a run.

Our own addresses are always called directly: loopback, this machine's names and addresses, the
nodes of the Ray cluster, its dashboard. All others follow `http_proxy`, `https_proxy`, `all_proxy`
and `no_proxy` of the environment. `keep_direct` adds our addresses to `no_proxy`, which httpx,
requests, urllib and the programs of a run read; `proxy_of` is for our own client.
"""

import base64
import ipaddress
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import unquote, urlsplit
from urllib.request import (
    getproxies_environment,
    proxy_bypass_environment,  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
)

import psutil

from raylearner.errors import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
EVERY_HOST = "*"
"""Entry of `no_proxy` by which no call goes through a proxy."""
PORTS = {"http": 80, "https": 443}
CONNECT_TIMEOUT_S = 10.0
"""Maximum time for a cluster to answer at its port."""
AUTH_MODES = ("token", "disabled")


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; shown without its credentials."""

    scheme: str
    host: str
    port: int
    authorization: str | None = field(repr=False)
    """Value of the header `Proxy-Authorization`."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


def are_set() -> bool:
    """Whether the environment names any proxy."""
    return bool(getproxies_environment().keys() - {"no"})


def keep_direct(*hosts: str) -> None:
    """Adds our own addresses, and `hosts`, to this process's `no_proxy`; its children inherit it."""
    os.environ.update(direct(os.environ, *hosts))


def direct(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return both spellings of `no_proxy` with our own addresses and `hosts` added."""
    given = environment.get("no_proxy") or environment.get("NO_PROXY") or ""
    listed = _entries(given)
    entries = dict.fromkeys([*listed, *LOOPBACK, *own_addresses(), *hosts])
    value = EVERY_HOST if EVERY_HOST in listed else ",".join(entries)
    return {"no_proxy": value, "NO_PROXY": value}


def host_of(url: str) -> str:
    """Return the host of a URL or of `host:port`."""
    return urlsplit(url if "://" in url else f"//{url}").hostname or ""


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy for calls to `url`, None for a direct call.

    Raises `ValueError` for a proxy that is not an HTTP proxy.
    """
    parts = urlsplit(url)
    named = getproxies_environment()
    proxy = named.get(parts.scheme) or named.get("all")
    if not proxy or not parts.hostname or _is_direct(parts.hostname, named):
        return None
    return _read(proxy)


def _is_direct(host: str, named: dict[str, str]) -> bool:
    address = _address(host)
    if host == "localhost" or host.endswith(".localhost"):
        return True
    if address is not None and (address.is_loopback or address.is_unspecified):
        return True
    entries = _entries(named.get("no", ""))
    if EVERY_HOST in entries:
        return True
    if address is not None and any(address in network for network in _networks(entries)):
        return True
    return host in own_addresses() or bool(proxy_bypass_environment(host, named))


def _read(proxy: str) -> Proxy:
    url = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(
            f"the proxy {parts.scheme}://{parts.hostname} of the environment is not an HTTP proxy;"
            " name one in http_proxy and https_proxy, or the service in no_proxy"
        )
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
    port = parts.port or PORTS[parts.scheme]
    return Proxy(parts.scheme, parts.hostname, port, authorization)


def _entries(no_proxy: str) -> list[str]:
    return no_proxy.replace(",", " ").split()


def _networks(
    entries: list[str],
) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Yield entries such as `10.0.0.0/8`, which urllib does not read."""
    for entry in entries:
        if "/" in entry:
            try:
                yield ipaddress.ip_network(entry, strict=False)
            except ValueError:
                continue


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


@lru_cache(maxsize=1)
def own_addresses() -> tuple[str, ...]:
    """Return this machine's name and addresses; link-local ones, which no URL names, are left
    out."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        a.address
        for all_of in psutil.net_if_addrs().values()
        for a in all_of
        if a.family in families
    ]
    return (socket.gethostname(), *(address for address in found if "%" not in address))


def check_reachable(address: str) -> None:
    """Raises `OSError` if nothing listens at `host:port`; other forms of addresses are left to Ray."""
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal() and int(port) < 2**16:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def refuse_bad_authentication() -> None:
    """Raises `ConfigError` for variables that would make Ray abort, or that it would ignore."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path and not os.environ.get("RAY_AUTH_TOKEN") and not _is_readable(path):
        raise ConfigError(
            f"RAY_AUTH_TOKEN_PATH={path}: the file is missing or cannot be read; unset it, or name the file"
            " that holds the cluster's token"
        )
    mode = os.environ.get("RAY_AUTH_MODE")
    if mode and mode.lower() not in AUTH_MODES:
        raise ConfigError(f"RAY_AUTH_MODE={mode}: Ray supports {' and '.join(AUTH_MODES)} only")


def _is_readable(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.R_OK)
