"""Two hosts on one machine: network namespaces, joined by a veth pair whose two ends are shaped with tc.

Needs Linux, root, and the commands ip, tc and taskset. gloo sends through the pair as through a network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HOSTS = tuple(f"fsdp-{os.getpid()}-{rank}" for rank in range(2))  # two runs do not meet
LINK = "fsdp0"


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """The two network namespaces; the block may start processes in them, which must have ended when it does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # namespaces would outlive us
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host)
        _run("ip", "link", "add", LINK, "netns", HOSTS[0], "type", "veth", "peer", "name", LINK, "netns", HOSTS[1])
        for number, host in enumerate(HOSTS, 1):
            _run("ip", "-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", LINK)
            _run("ip", "-n", host, "link", "set", LINK, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def shape(gigabits: float) -> None:
    """Limit the link to this rate (Gbit/s) in both directions; 0 is no limit."""
    shaped = ["tbf", "rate", f"{gigabits}gbit", "burst", "256kb", "latency", "200ms"] if gigabits else ["noqueue"]
    for host in HOSTS:
        _run("tc", "-n", host, "qdisc", "replace", "dev", LINK, "root", *shaped)


def on_host(host: int, command: list[str]) -> list[str]:
    """The command on a host, whose processes share a core."""
    return ["ip", "netns", "exec", HOSTS[host], "taskset", "-c", str(host % (os.cpu_count() or 1)), *command]


def environment(rank: int, port: int = 29507, world_size: int = 2) -> dict[str, str]:
    """The environment of a process of this rank; processes that share a port are one group."""
    group = {"WORLD_SIZE": str(world_size), "RANK": str(rank), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": str(port)}
    per_host = {"LOCAL_WORLD_SIZE": str(world_size // 2), "LOCAL_RANK": str(rank % (world_size // 2))}
    return {**os.environ, **group, **per_host, "GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}


def sent_bytes() -> int:
    """What this host has sent to the other, headers included; to be called by a process on the host."""
    return int(Path(f"/sys/class/net/{LINK}/statistics/tx_bytes").read_text())


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
