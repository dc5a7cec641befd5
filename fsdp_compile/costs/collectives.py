"""Collectives: the seconds of one message among the ranks of a mesh axis, by the alpha-beta model of a ring.

For N ranks on n nodes, and M bytes in full (the output of an all-gather, the input of a reduce-scatter):

    all-gather       start + (N - n) hop_within + (n - 1) hop_between + M (N - 1) / N / bandwidth
    reduce-scatter   the same; with M times the factor of the hardware, where that reduces by other means
    all-reduce       a reduce-scatter and an all-gather, started once: M times 2, or the factor of the hardware
    broadcast        start + (N - n) hop_within + (n - 1) hop_between + M / bandwidth
    all-to-all       start + hop + the longer of M (g - 1) / N / within and M (N - g) / N / between: of M bytes that a
                     rank has, each of the other ranks, g - 1 of which are on its node, gets one in N
    send             start + hop + M / bandwidth, to the next rank: between nodes, if the ring crosses any

The bandwidth is that of the slower level: the ranks of a node share their node's network cards, so a ring that passes
through g ranks of a node has the cards of g ranks. (The ring and its terms: NCCL; Thakur et al., 2005.)
"""

from __future__ import annotations

import dataclasses

from .arithmetic import equal, largest, select, smallest
from .hardware import Hardware

_ALIGNMENT = 16  # bytes of a rank's part; NVIDIA/nccl#413 reports a tenth of the bandwidth for others
_UNALIGNED = 10


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ranks of a mesh axis: how many, and how many of them share a node."""

    size: int
    ranks_per_node: int

    @classmethod
    def of_axis(cls, size: int, stride: int, hardware: Hardware) -> Ring:
        """The ring of an axis whose neighbouring ranks are `stride` apart, where ranks are numbered node by node."""
        return cls(size, largest(1, smallest(size, hardware.ranks_per_node // stride)))

    @property
    def num_nodes(self) -> int:
        return -(-self.size // self.ranks_per_node)

    def hops(self, hardware: Hardware) -> float:
        """Seconds in which the first byte passes all ranks."""
        within = (self.size - self.num_nodes) * hardware.within_node.hop
        return within + (self.num_nodes - 1) * hardware.between_nodes.hop

    def bandwidth(self, hardware: Hardware) -> float:
        """Bytes/s of the slower level that the ring passes."""
        within, between = hardware.within_node.bandwidth, self.ranks_per_node * hardware.between_nodes.bandwidth
        slower = select(self.ranks_per_node > 1, smallest(within, between), between)
        bandwidth: float = select(equal(self.num_nodes, 1), within, slower)
        return bandwidth


def sent(num_bytes: float, ring: Ring) -> float:
    """Bytes that a rank sends of a collective that moves each of `num_bytes` once."""
    return num_bytes * (ring.size - 1) / ring.size


def all_gather(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds until `num_bytes` are gathered on every rank."""
    if ring.size == 1:
        return 0.0
    return hardware.collective_start + ring.hops(hardware) + _transfer(num_bytes, ring, hardware)


def reduce_scatter(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds until `num_bytes` of every rank are reduced, and each rank has its part."""
    if ring.size == 1:
        return 0.0
    seconds = _transfer(num_bytes, ring, hardware) * hardware.reduce_scatter_factor
    return hardware.collective_start + ring.hops(hardware) + seconds


def all_reduce(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds until `num_bytes` of every rank are reduced on every rank."""
    if ring.size == 1:
        return 0.0
    seconds = _sending(num_bytes, ring, hardware) * hardware.all_reduce_factor  # cut where it suits the ring
    return hardware.collective_start + 2 * ring.hops(hardware) + seconds


def broadcast(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds until `num_bytes` of one rank are on every rank."""
    if ring.size == 1:
        return 0.0
    return hardware.collective_start + ring.hops(hardware) + num_bytes / ring.bandwidth(hardware)


def all_to_all(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds until every rank has an equal part of the `num_bytes` of each."""
    if ring.size == 1:
        return 0.0
    part, here = num_bytes / ring.size, ring.ranks_per_node
    within, between = hardware.within_node, hardware.between_nodes
    sending = largest(part * (here - 1) / within.bandwidth, part * (ring.size - here) / between.bandwidth)
    seconds: float = select(equal(ring.num_nodes, 1), within.hop, between.hop) + sending
    return hardware.collective_start + seconds


def send(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds until `num_bytes` of every rank are on its neighbour in the ring; the longest, if nodes are crossed."""
    link = hardware.within_node if ring.num_nodes == 1 else hardware.between_nodes
    return hardware.collective_start + link.hop + num_bytes / link.bandwidth


def _transfer(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    """Seconds that the bytes take, of a collective that moves each of them once, a rank's part in one piece."""
    is_aligned = equal(num_bytes / ring.size % _ALIGNMENT, 0)
    seconds: float = _sending(num_bytes, ring, hardware) * select(is_aligned, 1, _UNALIGNED)
    return seconds


def _sending(num_bytes: float, ring: Ring, hardware: Hardware) -> float:
    return sent(num_bytes, ring) / ring.bandwidth(hardware)
