"""Traffic between GPUs by hand."""

import pytest

from workflow.lib.planning.timing.gpu_traffic import Fabric, ring_seconds

ROUND = Fabric("made up", gpus_per_node=4, local=8e9, network=2e9)


def test_ring_inside_a_node_by_hand():
    # 4 GPUs: each receives 3/4 of 8 GB at 80% of 8 GB/s, in 3 hops
    assert ring_seconds(8e9, ROUND, processes=4) == pytest.approx(6 / 6.4 + 3 * 2e-6)


def test_ring_over_nodes_waits_for_the_slower_of_link_and_network():
    # 3 nodes of 4: each node receives 2/3 of 6 GB at 80% of 2 GB/s; 9 hops inside, 3 between
    assert ring_seconds(6e9, ROUND, processes=12) == pytest.approx(4 / 1.6 + 9 * 2e-6 + 3 * 1e-5)


def test_rings_over_replicas_share_the_network_of_a_node():
    # one GPU of each of 3 nodes; the 4 rings of the 4 GPUs at once
    assert ring_seconds(6e9, ROUND, processes=3, stride=4) == pytest.approx(4 * 4 / 1.6 + 3 * 1e-5)
